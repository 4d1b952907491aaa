#include "kernels/cpu/elementwise/scale.h"

#include <algorithm>

namespace millrace::cpu {

void scale_values(float by, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) x[i] *= by;
}

void scale_chosen(const float* scales, const int32_t* chosen, int64_t count, float* weights) {
  for (int64_t i = 0; i < count; ++i) weights[i] *= scales[chosen[i]];
}

void add_values(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

void scale_softcap(const Context& ctx, float scale, float softcap, int64_t count, float* x) {
  constexpr int64_t kValuesPerTask = 8192;  // 32 KiB: they stay in the first-level cache in between
  ctx.pool.parallel_for(tasks_for(count, kValuesPerTask), 1, [&](int64_t begin, int64_t end, int) {
    const int64_t first = begin * kValuesPerTask, size = std::min(count, end * kValuesPerTask) - first;
    scale_values(scale, size, x + first);
    if (softcap > 0.0f) ctx.kernels.softcap(x + first, softcap, size, x + first);
  });
}

}  // namespace millrace::cpu
