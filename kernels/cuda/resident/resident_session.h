// A sequence that stays on the GPU: cache, two streams, and the events that join them.
//
//   copy stream     append t     append t+1     ..     append t+16: waits for its group's decodes
//                      | copied     | copied
//   compute stream     +-> decode t +-> decode t+1 ..
//
// A token is appended while the one before is attended: the query and the host's staging have 16 slots in two
// groups. Calls of the driver take longer than the kernels, so events that protect slots are recorded once a
// group.
#pragma once

#include <memory>

#include "kernels/cuda/resident/decode_state.h"
#include "kernels/cuda/resident/resident_decode.h"

namespace millrace::cuda::resident {

// Makes a GPU current, and the one before it again.
class UseDevice {
 public:
  explicit UseDevice(int ordinal);
  ~UseDevice();
  UseDevice(const UseDevice&) = delete;
  UseDevice& operator=(const UseDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Throws ResidentError that names the argument.
void check_shape(const char* call, int32_t batch_heads, int32_t kv_heads, int32_t head_dim);

struct CudaFree {
  void operator()(void* memory) const { cudaFree(memory); }
};
struct CudaFreeHost {
  void operator()(void* memory) const { cudaFreeHost(memory); }
};
template <class T>
using DeviceArray = std::unique_ptr<T[], CudaFree>;
template <class T>
using PinnedArray = std::unique_ptr<T[], CudaFreeHost>;

class ResidentSession {
 public:
  explicit ResidentSession(const ResidentShape& shape);
  ~ResidentSession();
  ResidentSession(const ResidentSession&) = delete;
  ResidentSession& operator=(const ResidentSession&) = delete;

  const ResidentShape& shape() const { return shape_; }
  int32_t length() const { return state_.length(); }

  void load_token(const float* q, const float* k, const float* v);
  void load_prompt(const float* k, const float* v, int32_t tokens);
  void decode();
  void get_output(float* out);
  void reset();

  // For benchmarks: what decode() would launch over `keys` keys, and the plan it would take.
  DecodeCall call_over(int32_t keys) const;
  const ResidentWorkspace& workspace() const { return workspace_; }
  SplitPlan plan_over(int32_t keys) const {
    return plan_decode(keys, shape_.tiles(), sm_count_, max_cluster_);
  }
  int sm_count() const { return sm_count_; }
  int32_t max_cluster() const { return max_cluster_; }

 private:
  static constexpr uint32_t kSlots = 16, kGroupSlots = 8, kGroups = kSlots / kGroupSlots;
  static constexpr int64_t kChunkFloats = 1 << 20;  // a prompt's rows on their way, 4 MB
  static constexpr size_t kMaxSentFloats = 8192;    // an output that a kernel sends

  void allocate();
  void release() noexcept;
  size_t token_floats() const;
  size_t output_floats() const;
  uint32_t slot() const { return (tokens_ + kSlots - 1) % kSlots; }  // of the token loaded last
  float* staging_of(uint32_t slot) const { return staging_.get() + slot * token_floats(); }
  __half* query_of(uint32_t slot) const;
  void claim_slot(uint32_t slot);
  void wait_for_output();

  const ResidentShape shape_;
  DecodeState state_;
  int device_ = 0, sm_count_ = 0;
  int32_t max_cluster_ = 0;
  uint32_t tokens_ = 0;  // loaded since init, resets or not; wraps around
  cudaStream_t copy_ = nullptr, compute_ = nullptr;
  cudaEvent_t copied_ = nullptr;    // the token loaded last
  cudaEvent_t attended_ = nullptr;  // what is launched when a sequence ends
  cudaEvent_t group_copied_[kGroups] = {}, group_decoded_[kGroups] = {};
  PinnedArray<float> staging_;   // [kSlots, batch_heads + 2 kv_heads, head_dim]
  PinnedArray<float> host_out_;  // [batch_heads, head_dim]
  PinnedArray<uint32_t> sent_;   // [1]: the number of the output in host_out_
  uint32_t outputs_ = 0;         // asked for
  DeviceArray<__half> q_;        // [kSlots, batch_heads, kDim]
  DeviceArray<__half> k_, v_;    // [kv_heads, max_seq, kDim]
  DeviceArray<float> out_, chunk_, partial_out_;
  DeviceArray<float2> partial_sum_;
  DeviceArray<uint32_t> tickets_;
  ResidentWorkspace workspace_{};
};

}  // namespace millrace::cuda::resident
