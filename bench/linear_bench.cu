// Layers with a state on this machine's GPU through the C API: forward and backward, float32 in and out,
// microseconds (docs/kernels/state_space.md has the shapes).
//   linear_bench [tokens, 8192] [sequences, 1]
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "graph_time.cuh"
#include "kernels/cuda/resources.h"
#include "millrace/kernels.h"

namespace millrace::cuda {
namespace {

// Even numbers in [from, to).
__global__ void fill(float* to, size_t count, uint32_t seed, float from, float range) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    to[i] = from + range * static_cast<float>(x & 0xffffff) / 16777216.0f;
  }
}

void check(mr_status status) {
  if (status == MR_OK) return;
  std::fprintf(stderr, "%s\n", mr_last_error());
  std::exit(1);
}

struct Shape {
  const char* name;
  int32_t key_heads, heads, key_dim, value_dim;
};

class Bench {
 public:
  Bench(mr_device* device, const Shape& shape, int32_t tokens, int32_t sequences)
      : device_(device), s_(shape), tokens_(tokens), sequences_(sequences) {
    std::vector<int32_t> starts;
    for (int32_t i = 0; i <= sequences; ++i) starts.push_back(i * tokens);
    starts_ = DeviceBuffer(starts.size() * 4, "starts");
    MILLRACE_CUDA_TRY(cudaMemcpy(starts_.as<void>(), starts.data(), starts_.bytes(), cudaMemcpyHostToDevice));
    const size_t rows = static_cast<size_t>(tokens) * static_cast<size_t>(sequences);
    keys_ = rows * static_cast<size_t>(s_.key_heads * s_.key_dim);
    values_ = rows * static_cast<size_t>(s_.heads * s_.value_dim);
    gates_ = rows * static_cast<size_t>(s_.heads);
  }

  void run_delta() {
    mr_gated_delta_args f{};
    f.q = floats(keys_, -1.0f, 2.0f);
    f.k = floats(keys_, -0.15f, 0.3f);  // a length of about 1 at 128 dimensions
    f.v = floats(values_, -1.0f, 2.0f);
    f.g = floats(gates_, -0.1f, 0.1f);
    f.beta = floats(gates_, 0.0f, 1.0f);
    f.cu_seqlens = starts_.as<const int32_t>();
    f.out = floats(values_, 0.0f, 0.0f);
    f.sequences = sequences_;
    f.key_heads = s_.key_heads;
    f.value_heads = s_.heads;
    f.key_dim = s_.key_dim;
    f.value_dim = s_.value_dim;
    f.most_tokens = tokens_;
    mr_gated_delta_backward_args b{};
    b.forward = f;
    b.d_out = floats(values_, -1.0f, 2.0f);
    b.dq = floats(keys_, 0.0f, 0.0f);
    b.dk = floats(keys_, 0.0f, 0.0f);
    b.dv = floats(values_, 0.0f, 0.0f);
    b.dg = floats(gates_, 0.0f, 0.0f);
    b.dbeta = floats(gates_, 0.0f, 0.0f);
    report(f, mr_gated_delta_workspace_bytes, mr_chunk_gated_delta_rule, b,
           mr_gated_delta_backward_workspace_bytes, mr_gated_delta_backward);
  }

  // Plain linear attention is this too, with steps of 1 and rates of 0.
  void run_scan(bool plain) {
    mr_selective_scan_args f{};
    f.x = floats(values_, -1.0f, 2.0f);
    f.dt = plain ? floats(gates_, 1.0f, 0.0f) : floats(gates_, 0.0f, 0.1f);
    const auto heads = static_cast<size_t>(s_.heads);
    f.a = plain ? floats(heads, 0.0f, 0.0f) : floats(heads, -1.0f, 1.0f);
    f.b = floats(keys_, -0.15f, 0.3f);
    f.c = floats(keys_, -1.0f, 2.0f);
    f.cu_seqlens = starts_.as<const int32_t>();
    f.out = floats(values_, 0.0f, 0.0f);
    f.sequences = sequences_;
    f.groups = s_.key_heads;
    f.heads = s_.heads;
    f.state_dim = s_.key_dim;
    f.head_dim = s_.value_dim;
    f.most_tokens = tokens_;
    mr_selective_scan_backward_args b{};
    b.forward = f;
    b.d_out = floats(values_, -1.0f, 2.0f);
    b.dx = floats(values_, 0.0f, 0.0f);
    b.db = floats(keys_, 0.0f, 0.0f);
    b.dc = floats(keys_, 0.0f, 0.0f);
    if (!plain) {
      b.ddt = floats(gates_, 0.0f, 0.0f);
      b.da = floats(heads, 0.0f, 0.0f);
    }
    report(f, mr_selective_scan_workspace_bytes, mr_selective_scan, b,
           mr_selective_scan_backward_workspace_bytes, mr_selective_scan_backward);
  }

 private:
  float* floats(size_t count, float from, float range) {
    buffers_.emplace_back(std::max<size_t>(count, 1) * sizeof(float), "floats");
    fill<<<1024, 256>>>(buffers_.back().as<float>(), count, static_cast<uint32_t>(buffers_.size()), from,
                        range);
    return buffers_.back().as<float>();
  }
  template <class Args>
  double time(const Args& args, mr_status (*bytes_of)(mr_device*, const Args*, size_t*),
              mr_status (*run)(mr_device*, const Args*, void*, size_t, mr_stream), size_t& bytes) {
    check(bytes_of(device_, &args, &bytes));
    DeviceBuffer workspace(std::max<size_t>(bytes, 256), "workspace");
    MILLRACE_CUDA_TRY(cudaDeviceSynchronize());
    return median_us(stream_, 3, 15,
                     [&] { check(run(device_, &args, workspace.as<void>(), bytes, stream_.get())); });
  }
  template <class Forward, class Backward>
  void report(const Forward& f, mr_status (*f_bytes)(mr_device*, const Forward*, size_t*),
              mr_status (*f_run)(mr_device*, const Forward*, void*, size_t, mr_stream), const Backward& b,
              mr_status (*b_bytes)(mr_device*, const Backward*, size_t*),
              mr_status (*b_run)(mr_device*, const Backward*, void*, size_t, mr_stream)) {
    size_t none = 0, bytes = 0;
    const double forward = time(f, f_bytes, f_run, none), backward = time(b, b_bytes, b_run, bytes);
    std::printf(
        "%-18s %d x %6d, %d key heads of %d, %d value heads of %d: forward %8.1f us, backward %8.1f us, "
        "workspace %.0f MiB\n",
        s_.name, sequences_, tokens_, s_.key_heads, s_.key_dim, s_.heads, s_.value_dim, forward, backward,
        static_cast<double>(bytes) / 1048576.0);
  }

  mr_device* device_;
  const Shape s_;
  const int32_t tokens_, sequences_;
  Stream stream_;
  size_t keys_ = 0, values_ = 0, gates_ = 0;
  DeviceBuffer starts_;
  std::vector<DeviceBuffer> buffers_;
};

}  // namespace
}  // namespace millrace::cuda

int main(int argc, char** argv) {
  using namespace millrace::cuda;
  const int32_t tokens = argc > 1 ? std::atoi(argv[1]) : 8192, sequences = argc > 2 ? std::atoi(argv[2]) : 1;
  if (tokens < 1 || sequences < 1) {
    std::fprintf(stderr, "usage: linear_bench [tokens] [sequences]\n");
    return 2;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const mr_device_options options{2, nullptr};
  mr_device* device = nullptr;
  check(mr_device_open("cuda", &options, &device));
  Bench(device, {"gated delta", 16, 32, 128, 128}, tokens, sequences).run_delta();
  Bench(device, {"Mamba-2", 1, 80, 128, 64}, tokens, sequences).run_scan(false);
  Bench(device, {"linear attention", 16, 16, 64, 64}, tokens, sequences).run_scan(true);
  mr_device_close(device);
  return 0;
}
