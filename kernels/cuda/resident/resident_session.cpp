#include "kernels/cuda/resident/resident_session.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/cuda/resident/resident_error.h"

namespace millrace::cuda::resident {
namespace {

template <class T>
DeviceArray<T> device_array(size_t count, const char* what) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, count * sizeof(T)), what);
  return DeviceArray<T>(static_cast<T*>(memory));
}
template <class T>
PinnedArray<T> pinned_array(size_t count, const char* what) {
  void* memory = nullptr;
  check_cuda(cudaHostAlloc(&memory, count * sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable), what);
  return PinnedArray<T>(static_cast<T*>(memory));
}
cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "init: cudaEventCreate");
  return event;
}
cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "init: cudaStreamCreate");
  return stream;
}
void require_order(const std::string& fault) {
  if (!fault.empty()) throw ResidentError(MR_ERROR_INVALID, fault);
}

}  // namespace

UseDevice::UseDevice(int ordinal) {
  check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ == ordinal) return;
  check_cuda(cudaSetDevice(ordinal), "cudaSetDevice");
  changed_ = true;
}
UseDevice::~UseDevice() {
  if (changed_) cudaSetDevice(before_);
}

void check_shape(const char* call, int32_t batch_heads, int32_t kv_heads, int32_t head_dim) {
  require_range(batch_heads, 1, 1 << 20, call, "batch_heads");
  require_range(kv_heads, 1, batch_heads, call, "kv_heads");
  if (batch_heads % kv_heads != 0) {
    throw ResidentError(MR_ERROR_INVALID,
                        std::string(call) + ": batch_heads is " + std::to_string(batch_heads) +
                            ", expected a multiple of kv_heads " + std::to_string(kv_heads));
  }
  require_range(head_dim, 1, 256, call, "head_dim");
}

ResidentSession::ResidentSession(const ResidentShape& shape) : shape_(shape), state_(shape.max_seq) {
  try {
    allocate();
  } catch (...) {
    release();
    throw;
  }
}

ResidentSession::~ResidentSession() { release(); }

void ResidentSession::allocate() {
  check_cuda(cudaGetDevice(&device_), "init: cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&sm_count_, cudaDevAttrMultiProcessorCount, device_),
             "init: cudaDeviceGetAttribute");
  max_cluster_ = max_cluster_size(shape_);
  copy_ = make_stream();
  compute_ = make_stream();
  for (cudaEvent_t* event : {&copied_, &attended_}) *event = make_event();
  for (cudaEvent_t& event : group_copied_) event = make_event();
  for (cudaEvent_t& event : group_decoded_) event = make_event();
  const auto dim = static_cast<size_t>(shape_.padded_dim()), heads = static_cast<size_t>(shape_.batch_heads);
  const size_t cache = static_cast<size_t>(shape_.kv_heads) * static_cast<size_t>(shape_.max_seq) * dim;
  staging_ = pinned_array<float>(kSlots * token_floats(), "init: pinned memory of tokens");
  host_out_ = pinned_array<float>(output_floats(), "init: pinned memory of the output");
  sent_ = pinned_array<uint32_t>(1, "init: pinned memory of a flag");
  sent_[0] = 0;
  q_ = device_array<__half>(kSlots * heads * dim, "init: device memory of queries");
  k_ = device_array<__half>(cache, "init: device memory of the keys");
  v_ = device_array<__half>(cache, "init: device memory of the values");
  out_ = device_array<float>(output_floats(), "init: device memory of the output");
  chunk_ = device_array<float>(kChunkFloats, "init: device memory of a prompt's chunk");
  partial_out_ =
      device_array<float>(partial_out_floats(shape_, sm_count_), "init: device memory of the splits");
  partial_sum_ = device_array<float2>(partial_sums(shape_, sm_count_), "init: device memory of the sums");
  tickets_ =
      device_array<uint32_t>(static_cast<size_t>(shape_.tiles()), "init: device memory of the tickets");
  check_cuda(
      cudaMemsetAsync(tickets_.get(), 0, static_cast<size_t>(shape_.tiles()) * sizeof(uint32_t), compute_),
      "init: cudaMemset");
  check_cuda(cudaStreamSynchronize(compute_), "init: cudaStreamSynchronize");
  workspace_ = {partial_out_.get(), partial_sum_.get(), tickets_.get()};
}

// Waits for both streams; memory goes with the members.
void ResidentSession::release() noexcept {
  for (cudaStream_t stream : {copy_, compute_}) {
    if (stream == nullptr) continue;
    cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
  }
  for (cudaEvent_t event :
       {copied_, attended_, group_copied_[0], group_copied_[1], group_decoded_[0], group_decoded_[1]}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
}

size_t ResidentSession::token_floats() const {
  const size_t rows = static_cast<size_t>(shape_.batch_heads) + 2 * static_cast<size_t>(shape_.kv_heads);
  return rows * static_cast<size_t>(shape_.head_dim);
}

size_t ResidentSession::output_floats() const {
  return static_cast<size_t>(shape_.batch_heads) * static_cast<size_t>(shape_.head_dim);
}
__half* ResidentSession::query_of(uint32_t slot) const {
  return q_.get() + static_cast<size_t>(slot) * static_cast<size_t>(shape_.batch_heads) *
                        static_cast<size_t>(shape_.padded_dim());
}

// The first slot of a group: the appends of its last tokens have read the staging (the host waits), and their
// decodes the queries (the copy stream waits). An event that was never recorded is no wait.
void ResidentSession::claim_slot(uint32_t slot) {
  if (slot % kGroupSlots != 0) return;
  const uint32_t group = slot / kGroupSlots;
  check_cuda(cudaEventSynchronize(group_copied_[group]), "load_qkv: cudaEventSynchronize");
  check_cuda(cudaStreamWaitEvent(copy_, group_decoded_[group], 0), "load_qkv: cudaStreamWaitEvent");
}

void ResidentSession::load_token(const float* q, const float* k, const float* v) {
  require_order(state_.may_load_token());
  const UseDevice use(device_);
  const uint32_t slot = tokens_ % kSlots;
  claim_slot(slot);
  const auto dim = static_cast<size_t>(shape_.head_dim);
  const size_t q_floats = static_cast<size_t>(shape_.batch_heads) * dim;
  const size_t kv_floats = static_cast<size_t>(shape_.kv_heads) * dim;
  float* staging = staging_of(slot);
  std::memcpy(staging, q, q_floats * sizeof(float));
  std::memcpy(staging + q_floats, k, kv_floats * sizeof(float));
  std::memcpy(staging + q_floats + kv_floats, v, kv_floats * sizeof(float));
  check_cuda(launch_append_token(staging, shape_, state_.length(), query_of(slot), k_.get(), v_.get(), copy_),
             "load_qkv: launch");
  check_cuda(cudaEventRecord(copied_, copy_), "load_qkv: cudaEventRecord");
  if (slot % kGroupSlots == kGroupSlots - 1) {
    check_cuda(cudaEventRecord(group_copied_[slot / kGroupSlots], copy_), "load_qkv: cudaEventRecord");
  }
  ++tokens_;
  state_.token_done();
}

void ResidentSession::load_prompt(const float* k, const float* v, int32_t tokens) {
  require_order(state_.may_load_prompt(tokens));
  const UseDevice use(device_);
  const int64_t dim = shape_.head_dim, rows = kChunkFloats / dim;
  for (int side = 0; side < 2; ++side) {
    const float* from = side == 0 ? k : v;
    __half* to = side == 0 ? k_.get() : v_.get();
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      for (int64_t first = 0; first < tokens; first += rows) {
        const int64_t count = std::min<int64_t>(rows, tokens - first);
        const int64_t position = static_cast<int64_t>(head) * shape_.max_seq + state_.length() + first;
        check_cuda(
            cudaMemcpyAsync(chunk_.get(), from + (static_cast<int64_t>(head) * tokens + first) * dim,
                            static_cast<size_t>(count * dim) * sizeof(float), cudaMemcpyHostToDevice, copy_),
            "load_prompt: cudaMemcpy");
        check_cuda(launch_convert_rows(chunk_.get(), static_cast<int32_t>(count), shape_,
                                       to + position * shape_.padded_dim(), copy_),
                   "load_prompt: launch");
      }
    }
  }
  check_cuda(cudaStreamSynchronize(copy_), "load_prompt: cudaStreamSynchronize");
  state_.prompt_done(tokens);
}

DecodeCall ResidentSession::call_over(int32_t keys) const {
  return {shape_, query_of(slot()), k_.get(), v_.get(), out_.get(), keys};
}

void ResidentSession::decode() {
  require_order(state_.may_decode());
  const UseDevice use(device_);
  const int32_t keys = state_.length() + 1;
  check_cuda(cudaStreamWaitEvent(compute_, copied_, 0), "decode_gpu: cudaStreamWaitEvent");
  check_cuda(launch_decode_mma(call_over(keys), plan_over(keys), workspace_, compute_), "decode_gpu: launch");
  if (slot() % kGroupSlots == kGroupSlots - 1) {
    check_cuda(cudaEventRecord(group_decoded_[slot() / kGroupSlots], compute_),
               "decode_gpu: cudaEventRecord");
  }
  state_.decode_done();
}

void ResidentSession::get_output(float* out) {
  require_order(state_.may_get_output());
  const UseDevice use(device_);
  const size_t bytes = output_floats() * sizeof(float);
  if (output_floats() <= kMaxSentFloats) {
    check_cuda(launch_send_output(out_.get(), static_cast<int32_t>(output_floats()), host_out_.get(),
                                  sent_.get(), ++outputs_, compute_),
               "get_output: launch");
    wait_for_output();
  } else {
    check_cuda(cudaMemcpyAsync(host_out_.get(), out_.get(), bytes, cudaMemcpyDeviceToHost, compute_),
               "get_output: cudaMemcpy");
    check_cuda(cudaStreamSynchronize(compute_), "get_output: cudaStreamSynchronize");
  }
  std::memcpy(out, host_out_.get(), bytes);
}

// Reads the flag again and again; asks the driver now and then, so that a failed kernel is no wait without
// end.
void ResidentSession::wait_for_output() {
  std::atomic_ref<uint32_t> sent(sent_[0]);
  for (uint32_t turn = 1; sent.load(std::memory_order_acquire) != outputs_; ++turn) {
    if (turn % 8192 != 0) continue;
    const cudaError_t status = cudaStreamQuery(compute_);
    if (status == cudaErrorNotReady) continue;
    check_cuda(status, "get_output: cudaStreamQuery");
    check_cuda(cudaStreamSynchronize(compute_),
               "get_output: cudaStreamSynchronize");  // all is done, the flag too
    return;
  }
}

// The new sequence writes where a decode of the old one may still read.
void ResidentSession::reset() {
  const UseDevice use(device_);
  check_cuda(cudaEventRecord(attended_, compute_), "reset: cudaEventRecord");
  check_cuda(cudaStreamWaitEvent(copy_, attended_, 0), "reset: cudaStreamWaitEvent");
  state_.reset();
}

}  // namespace millrace::cuda::resident
