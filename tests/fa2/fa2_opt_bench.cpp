// The frozen table: the resident decode at Qwen2.5-0.5B's shape (14 heads, 2 KV heads, d64), 8 to 8,192 keys,
// against the baseline and against a resident version without tensor cores and splits. Prints one JSON
// object.
//   step    us, host to host: load_qkv, decode_gpu, get_output; the baseline's one call. Median of single
//   calls. pair    us a token, the host's clock: load_qkv and decode_gpu again and again, one wait at the
//   end. kernel  us on the GPU: launches in a CUDA graph, so that the host is not measured; mma and plain.
// fa2_opt_bench [--plans]: also the kernel under other cuts into splits.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/cuda/resident/resident_error.h"
#include "kernels/cuda/resident/resident_session.h"
#include "millrace/kernels/flash_attention_v2.h"
#include "millrace/kernels/flash_attention_v2_optimized.h"

namespace {

using namespace millrace::cuda::resident;
using Clock = std::chrono::steady_clock;

constexpr int kHeads = 14, kKvHeads = 2, kDim = 64;
constexpr int kLengths[] = {8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};

double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}
double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<int64_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}
void require(mr_status status) {
  if (status != MR_OK) throw ResidentError(status, mr_last_error());
}
std::vector<float> random_floats(size_t count) {
  static std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> x(count);
  for (float& y : x) y = normal(random);
  return x;
}

// us of one launch: a graph of 100 of them, replayed 20 times, the median.
double graph_time(const std::function<cudaError_t(cudaStream_t)>& launch) {
  constexpr int kLaunches = 100;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  cudaEvent_t begin, end;
  check_cuda(cudaStreamCreate(&stream), "stream");
  check_cuda(cudaEventCreate(&begin), "event");
  check_cuda(cudaEventCreate(&end), "event");
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < kLaunches; ++i) check_cuda(launch(stream), "launch");
  check_cuda(cudaStreamEndCapture(stream, &graph), "end of capture");
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "graph");
  std::vector<double> times;
  for (int i = 0; i < 25; ++i) {
    check_cuda(cudaEventRecord(begin, stream), "record");
    check_cuda(cudaGraphLaunch(exec, stream), "graph launch");
    check_cuda(cudaEventRecord(end, stream), "record");
    check_cuda(cudaStreamSynchronize(stream), "replay");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin, end), "time");
    if (i >= 5) times.push_back(1e3 * static_cast<double>(ms) / kLaunches);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  return median(times);
}

struct Inputs {
  explicit Inputs(int keys)
      : q(random_floats(kHeads * kDim)),
        k(random_floats(static_cast<size_t>(kKvHeads) * keys * kDim)),
        v(random_floats(k.size())),
        out(q.size()) {}
  std::vector<float> q, k, v, out;
};

double baseline_step(Inputs& in, int keys) {
  std::vector<double> times;
  for (int i = 0; i < 60; ++i) {
    const auto start = Clock::now();
    require(flash_attention_v2_decode(in.q.data(), in.k.data(), in.v.data(), in.out.data(), kHeads, kKvHeads,
                                      kDim, keys));
    if (i >= 10) times.push_back(us_since(start));
  }
  return median(times);
}

// Steps from keys - kSpan / 2 to keys + kSpan / 2, where there are so many.
void resident_steps(Inputs& in, int keys, double* step, double* pair) {
  constexpr int kSpan = 200;
  flash_attention_v2_opt* handle = nullptr;
  const int prompt = std::max(0, keys - kSpan / 2);
  // Short sequences begin anew before they are too long.
  const int rounds = prompt > 0 ? kSpan : std::min(kSpan, std::max(4, keys));
  require(flash_attention_v2_opt_init(&handle, kHeads, kKvHeads, kDim, prompt + kSpan));
  const auto begin_anew = [&] {
    require(flash_attention_v2_opt_reset(handle));
    if (prompt > 0) require(flash_attention_v2_opt_load_prompt(handle, in.k.data(), in.v.data(), prompt));
  };
  std::vector<double> times, pairs;
  for (int repeat = 0; repeat < 6; ++repeat) {
    begin_anew();
    for (int i = 0; i < rounds; ++i) {
      const auto start = Clock::now();
      require(flash_attention_v2_opt_load_qkv(handle, in.q.data(), in.k.data(), in.v.data()));
      require(flash_attention_v2_opt_decode_gpu(handle));
      require(flash_attention_v2_opt_get_output(handle, in.out.data()));
      if (repeat > 0) times.push_back(us_since(start));
    }
    begin_anew();
    const auto start = Clock::now();
    for (int i = 0; i < rounds; ++i) {
      require(flash_attention_v2_opt_load_qkv(handle, in.q.data(), in.k.data(), in.v.data()));
      require(flash_attention_v2_opt_decode_gpu(handle));
    }
    require(flash_attention_v2_opt_get_output(handle, in.out.data()));
    if (repeat > 0) pairs.push_back(us_since(start) / rounds);
  }
  *step = median(times);
  *pair = median(pairs);
  require(flash_attention_v2_opt_cleanup(&handle));
}

// A session that holds `keys` keys and a query.
void fill(ResidentSession& session, const Inputs& in, int keys) {
  if (keys > 1) session.load_prompt(in.k.data(), in.v.data(), keys - 1);
  session.load_token(in.q.data(), in.k.data(), in.v.data());
  check_cuda(cudaDeviceSynchronize(), "fill");
}

void measure(int keys, bool with_plans, bool last) {
  Inputs in(keys);
  ResidentSession session({kHeads, kKvHeads, kDim, keys});
  fill(session, in, keys);
  const DecodeCall call = session.call_over(keys);
  const auto mma_under = [&](SplitPlan plan) {
    return graph_time(
        [&](cudaStream_t stream) { return launch_decode_mma(call, plan, session.workspace(), stream); });
  };
  const SplitPlan plan = session.plan_over(keys);
  const double mma = mma_under(plan);
  const double plain = graph_time([&](cudaStream_t stream) { return launch_decode_plain(call, stream); });
  const double baseline = baseline_step(in, keys);
  double step = 0, pair = 0;
  resident_steps(in, keys, &step, &pair);
  std::printf(
      "  {\"keys\": %d, \"splits\": %d, \"step\": %.2f, \"baseline_step\": %.2f, \"pair\": %.2f, "
      "\"kernel\": %.2f, \"plain_kernel\": %.2f}%s\n",
      keys, plan.splits, step, baseline, pair, mma, plain, last ? "" : ",");
  std::fflush(stdout);
  if (!with_plans || keys <= kMaxKeysOfOneBlock) return;
  std::string line = "    plans:";
  const auto try_plan = [&](SplitPlan other) {
    char text[60];
    std::snprintf(text, sizeof text, " %s%dx%d: %.2f", other.cluster ? "cluster " : "", other.splits,
                  other.keys_per_split, mma_under(other));
    line += text;
  };
  for (int least : {64, 128, 256}) try_plan(plan_splits(keys, call.shape.tiles(), session.sm_count(), least));
  for (int size : {4, 8, 16}) {
    if (size <= session.max_cluster()) try_plan(plan_cluster(keys, size));
  }
  std::fprintf(stderr, "%5d keys%s\n", keys, line.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::fprintf(stderr, "\n*** SKIPPED: the resident decode was not measured: no GPU ***\n\n");
    return 77;
  }
  const bool with_plans = argc > 1 && std::strcmp(argv[1], "--plans") == 0;
  try {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    std::printf("{\"gpu\": \"%s\", \"shape\": \"14 heads, 2 KV heads, d64\", \"rows\": [\n", properties.name);
    for (int keys : kLengths) measure(keys, with_plans, keys == kLengths[std::size(kLengths) - 1]);
    std::printf("]}\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "fa2_opt_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
