#include "kernels/cpu/attention/query_gates.h"

#include <algorithm>

namespace millrace::cpu {
namespace {

constexpr int64_t kGatedRowsPerTask = 4;

}  // namespace

void split_gates(const float* from, int64_t heads, int64_t dim, float* query, float* gate) {
  for (int64_t i = 0; i < heads; ++i) {
    std::copy_n(from + 2 * i * dim, dim, query + i * dim);
    std::copy_n(from + (2 * i + 1) * dim, dim, gate + i * dim);
  }
}

void gate_attention(const Context& ctx, int64_t rows, int64_t cols, float* gate, float* y) {
  ctx.pool.parallel_for(rows, kGatedRowsPerTask, [&](int64_t begin, int64_t end, int) {
    float *of = gate + begin * cols, *to = y + begin * cols;
    const int64_t count = (end - begin) * cols;
    for (int64_t i = 0; i < count; ++i) of[i] = -of[i];
    ctx.kernels.exp(of, count, of);
    for (int64_t i = 0; i < count; ++i) to[i] /= 1.0f + of[i];
  });
}

}  // namespace millrace::cpu
