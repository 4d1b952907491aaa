// The plain baseline of flash_attention_v2.h.
#include "millrace/kernels/flash_attention_v2.h"

#include "kernels/cuda/resident/resident_error.h"
#include "kernels/cuda/resident/resident_session.h"

namespace millrace::cuda::resident {
namespace {

// Device memory of a thread, as large as its largest call; allocating on every call would be measured with
// it.
struct Buffer {
  float* at_least(size_t floats, int device) {
    if (floats > capacity || device != of_device) {
      memory.reset();
      capacity = 0;
      void* taken = nullptr;
      check_cuda(cudaMalloc(&taken, floats * sizeof(float)), "flash_attention_v2_decode: cudaMalloc");
      memory.reset(static_cast<float*>(taken));
      capacity = floats;
      of_device = device;
    }
    return memory.get();
  }
  DeviceArray<float> memory;
  size_t capacity = 0;
  int of_device = -1;
};
thread_local Buffer query_buffer, key_buffer, value_buffer, output_buffer;

void copy_floats(void* to, const void* from, size_t floats, cudaMemcpyKind kind) {
  check_cuda(cudaMemcpy(to, from, floats * sizeof(float), kind), "flash_attention_v2_decode: cudaMemcpy");
}

void decode_from_host(const float* q, const float* k, const float* v, float* out, int32_t batch_heads,
                      int32_t kv_heads, int32_t head_dim, int32_t seq_len) {
  const char* call = "flash_attention_v2_decode";
  check_shape(call, batch_heads, kv_heads, head_dim);
  require_range(seq_len, 1, 1 << 24, call, "seq_len");
  require_pointer(q, call, "q");
  require_pointer(k, call, "k");
  require_pointer(v, call, "v");
  require_pointer(out, call, "out");
  int device = 0;
  check_cuda(cudaGetDevice(&device), "flash_attention_v2_decode: cudaGetDevice");
  const size_t heads = static_cast<size_t>(batch_heads) * static_cast<size_t>(head_dim);
  const size_t keys =
      static_cast<size_t>(kv_heads) * static_cast<size_t>(seq_len) * static_cast<size_t>(head_dim);
  float* query = query_buffer.at_least(heads, device);
  float* key = key_buffer.at_least(keys, device);
  float* value = value_buffer.at_least(keys, device);
  float* output = output_buffer.at_least(heads, device);
  copy_floats(query, q, heads, cudaMemcpyHostToDevice);
  copy_floats(key, k, keys, cudaMemcpyHostToDevice);
  copy_floats(value, v, keys, cudaMemcpyHostToDevice);
  check_cuda(launch_decode_baseline(query, key, value, output, {batch_heads, kv_heads, head_dim, seq_len},
                                    seq_len, nullptr),
             "flash_attention_v2_decode: launch");
  copy_floats(out, output, heads, cudaMemcpyDeviceToHost);
}

}  // namespace
}  // namespace millrace::cuda::resident

extern "C" mr_status flash_attention_v2_decode(const float* q, const float* k, const float* v, float* out,
                                               int32_t batch_heads, int32_t kv_heads, int32_t head_dim,
                                               int32_t seq_len) {
  namespace resident = millrace::cuda::resident;
  return resident::guarded(
      [&] { resident::decode_from_host(q, k, v, out, batch_heads, kv_heads, head_dim, seq_len); });
}
