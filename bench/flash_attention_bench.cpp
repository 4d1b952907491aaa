// flash_attention_bench: attention over tensors on a CPU by the C API, forward and backward, in GFLOP/s and
// as a share of what one core's fused multiply-adds reach in the same run. Operations are counted as usual:
// two products forward, five backward (the kernels do seven), half of them with a causal mask. Seconds are of
// processor time with one thread, so that a busy machine can measure too; wall time with more.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "millrace/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

struct Options {
  std::string isa, type = "bf16";
  int threads = 1, heads = 8, kv_heads = 8, dim = 128, length = 1024, batch = 1;
  bool causal = false;
  double seconds = 1.0;  // per figure
};

double now(bool of_thread) {
  if (of_thread) {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class F>
double best_seconds(double budget, bool of_thread, F run) {
  double best = 1e30, spent = 0;
  for (int i = 0; i < 3 || spent < budget; ++i) {
    const double start = now(of_thread);
    run();
    const double took = now(of_thread) - start;
    best = std::min(best, took);
    spent += took;
  }
  return best;
}

// Sixteen chains of multiply-adds, `steps` each: operations done. The sums are returned so that they stay.
constexpr int kChains = 16;
#if defined(__x86_64__)
__attribute__((target("avx512f"))) double peak_avx512(int64_t steps, float* sink) {
  __m512 sum[kChains];
  for (__m512& s : sum) s = _mm512_set1_ps(1.0f);
  const __m512 a = _mm512_set1_ps(0.999f);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) sum[c] = _mm512_fmadd_ps(sum[c], a, a);
  }
  for (const __m512& s : sum) *sink += _mm512_cvtss_f32(s);
  return 2.0 * 16 * kChains * static_cast<double>(steps);
}
constexpr int kChains256 = 10;
__attribute__((target("avx2,fma"))) double peak_avx2(int64_t steps, float* sink) {
  __m256 sum[kChains256];
  for (__m256& s : sum) s = _mm256_set1_ps(1.0f);
  const __m256 a = _mm256_set1_ps(0.999f);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains256; ++c) sum[c] = _mm256_fmadd_ps(sum[c], a, a);
  }
  for (const __m256& s : sum) *sink += _mm256_cvtss_f32(s);
  return 2.0 * 8 * kChains256 * static_cast<double>(steps);
}
double peak(const std::string& isa, int64_t steps, float* sink) {
  return isa.find("avx512") == 0 || isa == "amx" ? peak_avx512(steps, sink) : peak_avx2(steps, sink);
}
#elif defined(__aarch64__)
double peak(const std::string&, int64_t steps, float* sink) {
  float32x4_t sum[kChains];
  for (float32x4_t& s : sum) s = vdupq_n_f32(1.0f);
  const float32x4_t a = vdupq_n_f32(0.999f);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) sum[c] = vfmaq_f32(a, sum[c], a);
  }
  for (const float32x4_t& s : sum) *sink += vgetq_lane_f32(s, 0);
  return 2.0 * 4 * kChains * static_cast<double>(steps);
}
#endif

void check(mr_status status) {
  if (status == MR_OK) return;
  std::fprintf(stderr, "flash_attention_bench: %s\n", mr_last_error());
  std::exit(1);
}

// A tensor [batch][length][heads][dim] of random numbers.
struct Array {
  Array(const Options& o, mr_dtype type, int heads) {
    int32_t elements = 0, bytes = 0;
    check(mr_dtype_block(type, &elements, &bytes));
    const int64_t count = int64_t{o.batch} * o.length * heads * o.dim;
    memory.resize(static_cast<size_t>(count * bytes) + 64);
    data = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> x(static_cast<size_t>(count));
    for (float& v : x) v = normal(random);
    mr_device* device = nullptr;
    check(mr_device_open("cpu", nullptr, &device));
    check(mr_quantize(device, type, x.data(), count / o.dim, o.dim, nullptr, data));
    mr_device_close(device);
    tensor = {data, int64_t{o.length} * heads * o.dim, int64_t{heads} * o.dim, o.dim};
  }
  std::vector<uint8_t> memory;
  uint8_t* data;
  mr_flash_tensor tensor{};
};

void run(const Options& o) {
  mr_dtype type{};
  check(mr_dtype_parse(o.type.c_str(), &type));
  mr_device* device = nullptr;
  const mr_device_options device_options{o.threads, o.isa.empty() ? nullptr : o.isa.c_str()};
  check(mr_device_open("cpu", &device_options, &device));
  const Array q(o, type, o.heads), k(o, type, o.kv_heads), v(o, type, o.kv_heads), out(o, type, o.heads),
      d_out(o, type, o.heads), d_q(o, type, o.heads), d_k(o, type, o.kv_heads), d_v(o, type, o.kv_heads);
  std::vector<float> lse(static_cast<size_t>(o.batch) * o.heads * o.length);
  mr_flash_problem p{};
  p.type = type;
  p.batch = o.batch;
  p.heads = o.heads;
  p.kv_heads = o.kv_heads;
  p.head_dim = p.value_dim = o.dim;
  p.max_q = p.max_k = o.length;
  p.window_left = -1;
  p.window_right = o.causal ? 0 : -1;
  size_t bytes = 0;
  check(mr_flash_backward_workspace_bytes(device, &p, 1, &bytes));
  std::vector<uint8_t> memory(bytes + 256);
  uint8_t* workspace = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  const mr_flash_gradients gradients{d_out.tensor, d_q.tensor, d_k.tensor, d_v.tensor, nullptr, 1};

  const bool alone = o.threads == 1;
  float sink = 0;
  double peak_operations = 0;
  const std::string name = mr_device_description(device);
  const std::string isa = name.substr(5, name.find(',', 5) - 5);
  const double peak_seconds = best_seconds(0.3, true, [&] { peak_operations = peak(isa, 2'000'000, &sink); });
  const double core = peak_operations / peak_seconds * 1e-9;
  const double product =
      2.0 * o.batch * o.heads * static_cast<double>(o.length) * o.length * o.dim * (o.causal ? 0.5 : 1.0);
  const auto report = [&](const char* what, double products, double seconds) {
    const double speed = products * product / seconds * 1e-9;
    std::printf("%-8s %s %d x %d, %d/%d heads of %d%s: %.1f GFLOP/s, %.0f%% of %.1f GFLOP/s a core\n", what,
                o.type.c_str(), o.batch, o.length, o.heads, o.kv_heads, o.dim, o.causal ? ", causal" : "",
                speed, 100.0 * speed / (core * o.threads), core);
    std::fflush(stdout);
  };
  std::printf("%s\n", name.c_str());
  report("forward", 2, best_seconds(o.seconds, alone, [&] {
           check(mr_flash_forward(device, &p, q.tensor, k.tensor, v.tensor, out.tensor, lse.data(), workspace,
                                  bytes, nullptr));
         }));
  report("backward", 5, best_seconds(o.seconds, alone, [&] {
           check(mr_flash_backward(device, &p, q.tensor, k.tensor, v.tensor, out.tensor, lse.data(),
                                   &gradients, workspace, bytes, nullptr));
         }));
  mr_device_close(device);
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  CLI::App app{"attention over tensors on a CPU: GFLOP/s forward and backward"};
  app.add_option("--isa", o.isa, "kernel table; the best there is unless given");
  app.add_option("--type", o.type, "f32, f16 or bf16")->capture_default_str();
  app.add_option("--threads", o.threads, "threads")->capture_default_str()->check(CLI::Range(1, 1024));
  app.add_option("--heads", o.heads, "query heads")->capture_default_str();
  app.add_option("--kv-heads", o.kv_heads, "key and value heads")->capture_default_str();
  app.add_option("--dim", o.dim, "dimensions of a head")->capture_default_str();
  app.add_option("--length", o.length, "queries and keys")->capture_default_str();
  app.add_option("--batch", o.batch, "sequences")->capture_default_str();
  app.add_option("--seconds", o.seconds, "per figure")->capture_default_str();
  app.add_flag("--causal", o.causal, "causal mask");
  CLI11_PARSE(app, argc, argv);
  run(o);
  return 0;
}
