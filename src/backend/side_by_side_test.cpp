// Executors side by side on one GPU: of one backend, of two backends of the same GPU (each with a Device of
// its own), and of two models; in threads and in turn. Each must give the bits that it gives alone. Decoding
// here runs kernels whose CTAs wait for one another (MXFP4 experts of one row, GEMMs with tiles cut between
// CTAs), of which only one executor of a GPU may launch any: two at once could wait for ever.
#include <gtest/gtest.h>

#include <cstdio>
#include <thread>

#include "backend/decode_model.h"

namespace millrace::decode_shapes {
namespace {

// The GPUs among the devices that are tested; none: the test is skipped, and says so.
std::vector<std::string> gpus() {
  std::vector<std::string> names = further_devices();
  std::erase_if(names, [](const std::string& name) { return !name.starts_with("cuda"); });
  return names;
}
#define SKIP_WITHOUT_GPUS() \
  if (gpus().empty()) GTEST_SKIP() << "*** MILLRACE_TEST_DEVICES names no GPU: nothing ran side by side ***"

// Another name for the same GPU.
std::string other_name(const std::string& gpu) { return gpu == "cuda" ? "cuda:0" : gpu; }

// One executor's work: a prompt in chunks, again and again, and what it should give.
struct Work {
  DecodeRunner runner;
  std::vector<int32_t> tokens;
  size_t chunk;
  std::vector<float> want;

  Work(Backend& backend, const DecodeModel& model, int seed, int32_t length, size_t chunk_tokens)
      : runner(backend, model),
        tokens(prompt(seed, length)),
        chunk(chunk_tokens),
        want(alone(backend, model, tokens, chunk_tokens)) {}
  void step(size_t at) { runner.step({{0, part(tokens, at, chunk)}}); }
  void run(int times) {
    for (int i = 0; i < times && !::testing::Test::HasFatalFailure(); ++i) {
      runner.restart();
      for (size_t at = 0; at < tokens.size(); at += chunk) step(at);
      check("side by side");
    }
  }
  void check(const std::string& what) {
    expect_same_bits(runner.logits(0), want, what + ", chunks of " + std::to_string(chunk));
  }
};

// Single rows on both sides, then single rows beside chunks of a prompt.
constexpr size_t kChunks[][2] = {{1, 1}, {1, 96}, {3, 1}, {33, 96}};
constexpr int32_t kTokens = 200;
constexpr int kTimes = 3;

void run_in_threads(Work& first, Work& second) {
  std::thread other([&] { second.run(kTimes); });
  first.run(kTimes);
  other.join();
}

void report(const char* what, const std::string& gpu) {
  std::printf("[  figure  ] cuda side by side: %s on %s, the same bits\n", what, gpu.c_str());
}

TEST(SideBySide, TwoExecutorsOfOneBackend) {
  SKIP_WITHOUT_GPUS();
  const DecodeModel model;
  for (const std::string& gpu : gpus()) {
    const auto backend = make_backend(gpu, {2});
    for (const auto& [a, b] : kChunks) {
      Work first(*backend, model, 1, kTokens, a), second(*backend, model, 2, kTokens, b);
      run_in_threads(first, second);
      if (HasFatalFailure()) return;
    }
    report("two executors of a backend", gpu);
  }
}

TEST(SideBySide, TwoDevicesOfOneGpu) {
  SKIP_WITHOUT_GPUS();
  const DecodeModel model;
  for (const std::string& gpu : gpus()) {
    const auto backend = make_backend(gpu, {2}), same_gpu = make_backend(other_name(gpu), {2});
    for (const auto& [a, b] : kChunks) {
      Work first(*backend, model, 3, kTokens, a), second(*same_gpu, model, 4, kTokens, b);
      run_in_threads(first, second);
      if (HasFatalFailure()) return;
    }
    report("two Devices of a GPU", gpu);
  }
}

TEST(SideBySide, TwoModelsInThreadsAndInTurn) {
  SKIP_WITHOUT_GPUS();
  const DecodeModel model, other_model(kOtherTypes[0]);
  for (const std::string& gpu : gpus()) {
    const auto backend = make_backend(gpu, {2}), same_gpu = make_backend(other_name(gpu), {2});
    Work first(*backend, model, 5, kTokens, 1), second(*same_gpu, other_model, 6, kTokens, 1);
    run_in_threads(first, second);
    if (HasFatalFailure()) return;
    first.runner.restart();
    second.runner.restart();
    for (size_t at = 0; at < static_cast<size_t>(kTokens); ++at) {  // steps of one between the other's
      first.step(at);
      second.step(at);
    }
    first.check("in turn");
    second.check("in turn");
    if (HasFatalFailure()) return;
    report("two models", gpu);
  }
}

// Backends come and go, with weights on their way to the GPU, while another's executor runs.
TEST(SideBySide, OneComesAndGoesWhileAnotherRuns) {
  SKIP_WITHOUT_GPUS();
  const DecodeModel model;
  for (const std::string& gpu : gpus()) {
    const auto backend = make_backend(gpu, {2});
    Work first(*backend, model, 7, kTokens, 1);
    std::thread other([&] {
      for (int i = 0; i < kTimes; ++i) {
        const auto passing = make_backend(other_name(gpu), {2});
        Work work(*passing, model, 8, kTokens / 4, 1);
        work.run(1);
      }
    });
    first.run(kTimes);
    other.join();
    if (HasFatalFailure()) return;
    report("one comes and goes", gpu);
  }
}

}  // namespace
}  // namespace millrace::decode_shapes
