// The resident decode and its baseline against a float64 oracle on the host, 1 to 8,192 keys, and every
// transition of its states, on this machine's GPU. Ends with status 1 when a check failed, 77 (SKIPPED,
// loudly) without a GPU.
//   fa2_opt_test [shapes|states|all]
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "millrace/kernels/flash_attention_v2.h"
#include "millrace/kernels/flash_attention_v2_optimized.h"

namespace {

int checks = 0, failures = 0;

void check(bool good, const std::string& what) {
  ++checks;
  if (good) return;
  ++failures;
  std::printf("FAILED: %s (%s)\n", what.c_str(), mr_last_error());
  std::fflush(stdout);
}
void check_refused(mr_status got, const char* expected_words, const std::string& what) {
  const bool refused = got == MR_ERROR_INVALID && std::strstr(mr_last_error(), expected_words) != nullptr;
  check(refused,
        what + ": expected MR_ERROR_INVALID with \"" + expected_words + "\", got " + mr_status_name(got));
}

struct Shape {
  int heads, kv_heads, dim;
};

// A sequence of keys and values, [kv_heads][capacity][dim], and one query row a head for each length.
struct Problem {
  Problem(Shape of, int keys, unsigned seed) : shape(of), capacity(keys) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.f, 1.f);
    const auto fill = [&](std::vector<float>& x, int rows) {
      x.resize(static_cast<size_t>(rows) * of.dim);
      for (float& y : x) y = normal(random);
    };
    fill(q, of.heads);
    fill(k, of.kv_heads * keys);
    fill(v, of.kv_heads * keys);
    for (float& y : q) y *= 2;  // a softmax that has peaks
  }
  // [kv_heads][dim] of token j
  std::vector<float> token(const std::vector<float>& x, int j) const {
    std::vector<float> rows;
    for (int h = 0; h < shape.kv_heads; ++h) {
      const auto at = x.begin() + (static_cast<int64_t>(h) * capacity + j) * shape.dim;
      rows.insert(rows.end(), at, at + shape.dim);
    }
    return rows;
  }
  // [kv_heads][tokens][dim] of the first `tokens`
  std::vector<float> prompt(const std::vector<float>& x, int tokens) const {
    std::vector<float> rows;
    for (int h = 0; h < shape.kv_heads; ++h) {
      const auto at = x.begin() + static_cast<int64_t>(h) * capacity * shape.dim;
      rows.insert(rows.end(), at, at + static_cast<int64_t>(tokens) * shape.dim);
    }
    return rows;
  }
  std::vector<double> expected(int keys) const;

  Shape shape;
  int capacity;
  std::vector<float> q, k, v;
};

std::vector<double> Problem::expected(int keys) const {
  std::vector<double> out(q.size(), 0), p(keys);
  for (int h = 0; h < shape.heads; ++h) {
    const int64_t start = static_cast<int64_t>(h / (shape.heads / shape.kv_heads)) * capacity * shape.dim;
    double top = -INFINITY, sum = 0;
    for (int j = 0; j < keys; ++j) {
      double score = 0;
      for (int d = 0; d < shape.dim; ++d) {
        score +=
            static_cast<double>(q[h * shape.dim + d]) * k[start + static_cast<int64_t>(j) * shape.dim + d];
      }
      p[j] = score / std::sqrt(static_cast<double>(shape.dim));
      top = std::max(top, p[j]);
    }
    for (int j = 0; j < keys; ++j) sum += p[j] = std::exp(p[j] - top);
    for (int j = 0; j < keys; ++j) {
      for (int d = 0; d < shape.dim; ++d) {
        out[h * shape.dim + d] += p[j] / sum * v[start + static_cast<int64_t>(j) * shape.dim + d];
      }
    }
  }
  return out;
}

// |out - expected| / |expected| per head; the worst of them.
void compare(const std::vector<float>& out, const std::vector<double>& expected, int dim, double bound,
             const std::string& what) {
  double worst = 0;
  size_t worst_head = 0;
  for (size_t head = 0; head < out.size() / dim; ++head) {
    double error = 0, norm = 0;
    for (int d = 0; d < dim; ++d) {
      const double x = expected[head * dim + d], e = out[head * dim + d] - x;
      error += e * e;
      norm += x * x;
    }
    const double relative = std::sqrt(error / norm);
    if (!(relative <= worst)) {  // NaN as well
      worst = relative;
      worst_head = head;
    }
  }
  char line[200];
  std::snprintf(line, sizeof line, "%s: relative error %.2e in head %zu, expected at most %.1e", what.c_str(),
                worst, worst_head, bound);
  check(worst <= bound, line);
}

// Inputs rounded to FP16, half of a unit in the last place: 2^-11 each of q and k (a score of some units is
// off by 2^-10 of |q| |k| / sqrt(d) in the worst case, by less at random), of p and of v. Seen: 4e-4.
constexpr double kBoundFp16 = 2e-3;
constexpr double kBoundFloat = 2e-5;
constexpr float kPoison = 12345.f;

std::string name_of(Shape s, int keys, const char* how) {
  return std::string(how) + " " + std::to_string(s.heads) + "/" + std::to_string(s.kv_heads) + " heads, d" +
         std::to_string(s.dim) + ", " + std::to_string(keys) + " keys";
}

void test_length(Shape shape, int keys) {
  const Problem problem(shape, keys, 17u + static_cast<unsigned>(keys));
  const std::vector<double> expected = problem.expected(keys);
  std::vector<float> out(problem.q.size(), kPoison);
  check(flash_attention_v2_decode(problem.q.data(), problem.k.data(), problem.v.data(), out.data(),
                                  shape.heads, shape.kv_heads, shape.dim, keys) == MR_OK,
        name_of(shape, keys, "baseline"));
  compare(out, expected, shape.dim, kBoundFloat, name_of(shape, keys, "baseline"));

  flash_attention_v2_opt* handle = nullptr;
  const std::string name = name_of(shape, keys, "resident");
  check(flash_attention_v2_opt_init(&handle, shape.heads, shape.kv_heads, shape.dim, keys) == MR_OK, name);
  if (keys > 1) {
    check(flash_attention_v2_opt_load_prompt(handle, problem.prompt(problem.k, keys - 1).data(),
                                             problem.prompt(problem.v, keys - 1).data(), keys - 1) == MR_OK,
          name + " load_prompt");
  }
  const std::vector<float> k = problem.token(problem.k, keys - 1), v = problem.token(problem.v, keys - 1);
  check(flash_attention_v2_opt_load_qkv(handle, problem.q.data(), k.data(), v.data()) == MR_OK,
        name + " load");
  check(flash_attention_v2_opt_decode_gpu(handle) == MR_OK, name + " decode");
  out.assign(out.size(), kPoison);
  check(flash_attention_v2_opt_get_output(handle, out.data()) == MR_OK, name + " output");
  compare(out, expected, shape.dim, kBoundFp16, name);
  check_refused(flash_attention_v2_opt_load_qkv(handle, problem.q.data(), k.data(), v.data()),
                "no room for 1", name + " full");
  // The same again after a reset has the same bits: tickets are back at 0, and nothing depends on who came
  // last.
  check(flash_attention_v2_opt_reset(handle) == MR_OK, name + " reset");
  if (keys > 1) {
    flash_attention_v2_opt_load_prompt(handle, problem.prompt(problem.k, keys - 1).data(),
                                       problem.prompt(problem.v, keys - 1).data(), keys - 1);
  }
  flash_attention_v2_opt_load_qkv(handle, problem.q.data(), k.data(), v.data());
  flash_attention_v2_opt_decode_gpu(handle);
  std::vector<float> again(out.size(), kPoison);
  flash_attention_v2_opt_get_output(handle, again.data());
  check(std::memcmp(out.data(), again.data(), out.size() * sizeof(float)) == 0,
        name + ": the same bits again");
  check(flash_attention_v2_opt_cleanup(&handle) == MR_OK && handle == nullptr, name + " cleanup");
}

// A sequence token by token, its outputs read only at some lengths: appends run beside decodes.
void test_growing(Shape shape, int keys) {
  const Problem problem(shape, keys, 5);
  flash_attention_v2_opt* handle = nullptr;
  check(flash_attention_v2_opt_init(&handle, shape.heads, shape.kv_heads, shape.dim, keys) == MR_OK,
        "growing init");
  std::vector<float> out(problem.q.size());
  for (int j = 0; j < keys; ++j) {
    const std::vector<float> k = problem.token(problem.k, j), v = problem.token(problem.v, j);
    check(flash_attention_v2_opt_load_qkv(handle, problem.q.data(), k.data(), v.data()) == MR_OK,
          "growing load");
    check(flash_attention_v2_opt_decode_gpu(handle) == MR_OK, "growing decode");
    if (j % 37 != 0 && j + 1 != keys) continue;
    out.assign(out.size(), kPoison);
    check(flash_attention_v2_opt_get_output(handle, out.data()) == MR_OK, "growing output");
    compare(out, problem.expected(j + 1), shape.dim, kBoundFp16, name_of(shape, j + 1, "growing"));
  }
  flash_attention_v2_opt_cleanup(&handle);
}

// Loads of a new sequence right behind decodes of the old one: nothing of either is seen by the other.
void test_reset_under_load(Shape shape) {
  const int keys = 2000;
  const Problem old(shape, keys, 1), fresh(shape, 1, 2);
  flash_attention_v2_opt* handle = nullptr;
  flash_attention_v2_opt_init(&handle, shape.heads, shape.kv_heads, shape.dim, keys);
  const std::vector<float> old_k = old.prompt(old.k, keys - 1), old_v = old.prompt(old.v, keys - 1);
  std::vector<float> out(fresh.q.size());
  for (int round = 0; round < 20; ++round) {
    flash_attention_v2_opt_load_prompt(handle, old_k.data(), old_v.data(), keys - 1);
    flash_attention_v2_opt_load_qkv(handle, old.q.data(), old.token(old.k, keys - 1).data(),
                                    old.token(old.v, keys - 1).data());
    check(flash_attention_v2_opt_decode_gpu(handle) == MR_OK, "reset under load: decode");
    if (round % 2 == 0) {
      flash_attention_v2_opt_get_output(handle, out.data());
      compare(out, old.expected(keys), shape.dim, kBoundFp16, "reset under load: the old sequence");
    }
    check(flash_attention_v2_opt_reset(handle) == MR_OK, "reset under load");
    flash_attention_v2_opt_load_qkv(handle, fresh.q.data(), fresh.k.data(), fresh.v.data());
    flash_attention_v2_opt_decode_gpu(handle);
    out.assign(out.size(), kPoison);
    flash_attention_v2_opt_get_output(handle, out.data());
    compare(out, fresh.expected(1), shape.dim, kBoundFp16, "reset under load: the new sequence");
    flash_attention_v2_opt_reset(handle);
  }
  flash_attention_v2_opt_cleanup(&handle);
}

void test_states() {
  const Problem p({4, 2, 64}, 8, 3);
  std::vector<float> out(p.q.size(), kPoison);
  const float *q = p.q.data(), *k = p.k.data(), *v = p.v.data();
  flash_attention_v2_opt* handle = nullptr;
  // Uninitialized
  check_refused(flash_attention_v2_opt_load_qkv(nullptr, q, k, v), "handle is NULL", "load before init");
  check_refused(flash_attention_v2_opt_load_prompt(nullptr, k, v, 1), "handle is NULL", "prompt before init");
  check_refused(flash_attention_v2_opt_decode_gpu(nullptr), "handle is NULL", "decode before init");
  check_refused(flash_attention_v2_opt_get_output(nullptr, out.data()), "handle is NULL",
                "output before init");
  check_refused(flash_attention_v2_opt_reset(nullptr), "handle is NULL", "reset before init");
  check(flash_attention_v2_opt_cleanup(&handle) == MR_OK, "cleanup before init");
  check(flash_attention_v2_opt_cleanup(nullptr) == MR_OK, "cleanup of a thread's own before there is one");
  // init's arguments
  check_refused(flash_attention_v2_opt_init(nullptr, 4, 2, 64, 8), "handle is NULL", "init to NULL");
  check_refused(flash_attention_v2_opt_init(&handle, 0, 2, 64, 8), "batch_heads is 0", "no heads");
  check_refused(flash_attention_v2_opt_init(&handle, 4, 0, 64, 8), "kv_heads is 0", "no KV heads");
  check_refused(flash_attention_v2_opt_init(&handle, 4, 3, 64, 8), "multiple of kv_heads 3",
                "4 heads over 3");
  check_refused(flash_attention_v2_opt_init(&handle, 4, 2, 0, 8), "head_dim is 0", "head_dim 0");
  check_refused(flash_attention_v2_opt_init(&handle, 4, 2, 257, 8), "head_dim is 257", "head_dim 257");
  check_refused(flash_attention_v2_opt_init(&handle, 4, 2, 64, 0), "max_seq is 0", "max_seq 0");
  check_refused(flash_attention_v2_opt_init(&handle, 4, 2, 64, -1), "max_seq is -1", "max_seq -1");
  check(handle == nullptr, "a refused init leaves the handle NULL");
  // Initialized
  check(flash_attention_v2_opt_init(&handle, 4, 2, 64, 3) == MR_OK, "init");
  flash_attention_v2_opt* again = handle;
  check_refused(flash_attention_v2_opt_init(&again, 4, 2, 64, 3), "not NULL", "init twice");
  check_refused(flash_attention_v2_opt_decode_gpu(handle), "nothing is loaded", "decode before load");
  check_refused(flash_attention_v2_opt_get_output(handle, out.data()), "nothing was decoded",
                "output before decode");
  check(flash_attention_v2_opt_reset(handle) == MR_OK, "reset of an initialized one");
  check_refused(flash_attention_v2_opt_load_qkv(handle, nullptr, k, v), "q is NULL", "load q NULL");
  check_refused(flash_attention_v2_opt_load_qkv(handle, q, nullptr, v), "k is NULL", "load k NULL");
  check_refused(flash_attention_v2_opt_load_qkv(handle, q, k, nullptr), "v is NULL", "load v NULL");
  check_refused(flash_attention_v2_opt_load_prompt(handle, nullptr, v, 1), "k is NULL", "prompt k NULL");
  check_refused(flash_attention_v2_opt_load_prompt(handle, k, nullptr, 1), "v is NULL", "prompt v NULL");
  check_refused(flash_attention_v2_opt_load_prompt(handle, k, v, 0), "tokens is 0", "a prompt of nothing");
  check_refused(flash_attention_v2_opt_load_prompt(handle, k, v, 4), "no room for 4", "a prompt too long");
  check_refused(flash_attention_v2_opt_decode_gpu(handle), "nothing is loaded", "decode after refused loads");
  // Ready, a token loaded
  check(flash_attention_v2_opt_load_qkv(handle, q, k, v) == MR_OK, "load");
  check_refused(flash_attention_v2_opt_load_qkv(handle, q, k, v), "loaded already", "load twice");
  check_refused(flash_attention_v2_opt_load_prompt(handle, k, v, 1), "a token is loaded",
                "prompt after load");
  check_refused(flash_attention_v2_opt_get_output(handle, out.data()), "nothing was decoded",
                "output before decode");
  // Ready, decoded
  check(flash_attention_v2_opt_decode_gpu(handle) == MR_OK, "decode");
  check_refused(flash_attention_v2_opt_decode_gpu(handle), "decoded already", "decode twice");
  check_refused(flash_attention_v2_opt_get_output(handle, nullptr), "out is NULL", "output to NULL");
  check(out[0] == kPoison, "refused calls write nothing");
  check(flash_attention_v2_opt_get_output(handle, out.data()) == MR_OK, "output");
  check(out[0] != kPoison, "output is there");
  check(flash_attention_v2_opt_get_output(handle, out.data()) == MR_OK, "output again");
  check(flash_attention_v2_opt_load_prompt(handle, k, v, 1) == MR_OK, "prompt after decode");
  check(flash_attention_v2_opt_load_qkv(handle, q, k, v) == MR_OK, "load the last");
  check(flash_attention_v2_opt_decode_gpu(handle) == MR_OK, "decode the last");
  check_refused(flash_attention_v2_opt_load_qkv(handle, q, k, v), "3 of max_seq 3", "full");
  check_refused(flash_attention_v2_opt_load_prompt(handle, k, v, 1), "3 of max_seq 3", "full, by a prompt");
  check(flash_attention_v2_opt_get_output(handle, out.data()) == MR_OK, "output of a full one");
  check(flash_attention_v2_opt_reset(handle) == MR_OK, "reset of a full one");
  check_refused(flash_attention_v2_opt_get_output(handle, out.data()), "nothing was decoded",
                "output after reset");
  check(flash_attention_v2_opt_load_qkv(handle, q, k, v) == MR_OK, "load after reset");
  check(flash_attention_v2_opt_reset(handle) == MR_OK, "reset of a loaded one");
  check_refused(flash_attention_v2_opt_decode_gpu(handle), "nothing is loaded", "decode after reset");
  check(flash_attention_v2_opt_load_qkv(handle, q, k, v) == MR_OK, "load again");
  check(flash_attention_v2_opt_cleanup(&handle) == MR_OK && handle == nullptr, "cleanup of a loaded one");
  check(flash_attention_v2_opt_cleanup(&handle) == MR_OK, "cleanup twice");
  check_refused(flash_attention_v2_decode(q, k, v, out.data(), 4, 3, 64, 1), "multiple of kv_heads",
                "baseline shape");
  check_refused(flash_attention_v2_decode(q, nullptr, v, out.data(), 4, 2, 64, 1), "k is NULL",
                "baseline k NULL");
  check_refused(flash_attention_v2_decode(q, k, v, out.data(), 4, 2, 64, 0), "seq_len is 0",
                "baseline seq_len 0");
}

// The one call that does everything: its own sequence per thread, a new one when the shape changes.
void test_whole_decode() {
  const auto run = [](Shape shape, int keys, const char* who) {
    const Problem problem(shape, keys, 11);
    std::vector<float> out(problem.q.size());
    for (int j = 0; j < keys; ++j) {
      out.assign(out.size(), kPoison);
      const std::vector<float> k = problem.token(problem.k, j), v = problem.token(problem.v, j);
      check(flash_attention_v2_opt_decode(problem.q.data(), k.data(), v.data(), out.data(), shape.heads,
                                          shape.kv_heads, shape.dim, keys) == MR_OK,
            std::string("whole decode, ") + who);
      compare(out, problem.expected(j + 1), shape.dim, kBoundFp16, name_of(shape, j + 1, who));
    }
    const std::vector<float> k = problem.token(problem.k, 0), v = problem.token(problem.v, 0);
    check_refused(flash_attention_v2_opt_decode(problem.q.data(), k.data(), v.data(), out.data(), shape.heads,
                                                shape.kv_heads, shape.dim, keys),
                  "no room for 1", "whole decode, full");
    check(flash_attention_v2_opt_reset(nullptr) == MR_OK, "reset of a thread's own");
    check(flash_attention_v2_opt_decode(problem.q.data(), k.data(), v.data(), out.data(), shape.heads,
                                        shape.kv_heads, shape.dim, keys) == MR_OK,
          "whole decode after reset");
    compare(out, problem.expected(1), shape.dim, kBoundFp16, "whole decode after reset");
    check_refused(flash_attention_v2_opt_decode(problem.q.data(), k.data(), v.data(), nullptr, shape.heads,
                                                shape.kv_heads, shape.dim, keys),
                  "out is NULL", "whole decode, out NULL");
  };
  run({14, 2, 64}, 20, "first shape");
  run({6, 3, 128}, 9, "another shape");
  std::thread other([&] { run({8, 8, 64}, 20, "another thread"); });
  run({4, 1, 80}, 20, "beside a thread");
  other.join();
  check(flash_attention_v2_opt_cleanup(nullptr) == MR_OK, "cleanup of a thread's own");
  check(flash_attention_v2_opt_cleanup(nullptr) == MR_OK, "cleanup of a thread's own, twice");
}

void test_shapes() {
  for (int keys :
       {1,   2,   7,   8,   15,  16,   17,   31,   63,   64,   65,   127,  128,  129,  255,  256,  257,
        272, 273, 511, 512, 513, 1000, 1023, 1024, 1025, 2047, 2048, 3000, 4095, 4096, 4097, 8191, 8192}) {
    test_length({14, 2, 64}, keys);
  }
  const Shape others[] = {{1, 1, 64},  {8, 8, 64},   {32, 2, 64},  {40, 1, 64},   {64, 8, 128},
                          {9, 1, 128}, {24, 2, 128}, {7, 7, 96},   {8, 4, 256},   {12, 1, 256},
                          {3, 3, 8},   {14, 2, 80},  {20, 2, 200}, {448, 64, 64}, {300, 300, 64}};
  for (Shape shape : others) {
    for (int keys : {1, 33, 256, 257, 1500, 4099}) {
      if (shape.heads < 100 || keys < 2000) test_length(shape, keys);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    std::printf("\n*** SKIPPED: the resident decode was not tested: no GPU (%s) ***\n\n",
                cudaGetErrorString(error));
    return 77;
  }
  const std::string part = argc > 1 ? argv[1] : "all";
  if (part == "states" || part == "all") {
    test_states();
    test_whole_decode();
  }
  if (part == "shapes" || part == "all") {
    test_shapes();
    test_growing({14, 2, 64}, 700);
    test_growing({8, 1, 128}, 300);
    test_reset_under_load({14, 2, 64});
  }
  std::printf("fa2_opt_test %s: %d checks, %d failed\n", part.c_str(), checks, failures);
  return failures == 0 ? 0 : 1;
}
