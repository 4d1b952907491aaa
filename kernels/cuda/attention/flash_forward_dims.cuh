// Which tiles each head size has.
#pragma once

#include "kernels/cuda/attention/flash_forward_launch.cuh"

namespace millrace::cuda {

// Windows so narrow that all keys of a warpgroup's queries are one tile, from a multiple of 16 on. Stages
// have room for those of three warpgroups, of 16 tokens each at most.
inline constexpr int32_t kFlashNarrowKeys = 160, kFlashNarrowRows = kFlashNarrowKeys + 2 * 16;
inline bool flash_is_narrow(const mr_flash_problem& p) {
  const int32_t group = p.heads / p.kv_heads, tokens = 64 / group;
  if (p.window_left < 0 || p.window_right < 0 || p.pages != nullptr) return false;
  return 64 % group == 0 && tokens <= 16 &&
         int64_t{p.window_left} + p.window_right + tokens + 15 <= kFlashNarrowKeys;
}

template <class Element>
void launch_flash_forward_dims(const FlashForwardCall& call, const Launch& at) {
  const mr_flash_problem& problem = call.problem;
  const int32_t dim = problem.head_dim, both = dim > problem.value_dim ? dim : problem.value_dim;
  const auto launch = [&]<class Config>(Config) { launch_flash_forward_as<Config>(call, at); };
  if (problem.blocks != nullptr) {  // tiles of as many queries as a block has
    const bool large = problem.blocks->block_q == 128;
    if (both <= 64 && large) return launch(FlashForwardConfig<Element, 64, 64, 128, 2, 4, true, true>{});
    if (both <= 64) return launch(FlashForwardConfig<Element, 64, 64, 128, 1, 5, false, true>{});
    if (large) return launch(FlashForwardConfig<Element, 128, 128, 128, 2, 2, true, true>{});
    return launch(FlashForwardConfig<Element, 128, 128, 128, 1, 3, false, true>{});
  }
  if (flash_is_decode(problem)) {
    if (both <= 64) return launch(FlashForwardConfig<Element, 64, 64, 128, 1, 5, false>{});
    if (both <= 128) return launch(FlashForwardConfig<Element, 128, 128, 128, 1, 3, false>{});
    return launch(FlashForwardConfig<Element, 256, 256, 64, 1, 2, false>{});
  }
  // More keys a tile pay where few tiles are masked.
  const bool whole = problem.window_left < 0 && problem.pages == nullptr;
  if (both <= 64 && flash_is_narrow(problem)) {
    return launch(
        FlashForwardConfig<Element, 64, 64, kFlashNarrowKeys, 3, 3, false, false, kFlashNarrowRows>{});
  }
  if (both <= 64 && problem.window_left >= 0) {
    return launch(FlashForwardConfig<Element, 64, 64, 128, 3, 4, false, false, 0, true>{});
  }
  if (both <= 64) return launch(FlashForwardConfig<Element, 64, 64, 128, 3, 4, false>{});
  if (both <= 96) return launch(FlashForwardConfig<Element, 96, 96, 128, 2, 2, true>{});
  if (both <= 128 && whole) return launch(FlashForwardConfig<Element, 128, 128, 176, 2, 2, true>{});
  if (both <= 128) return launch(FlashForwardConfig<Element, 128, 128, 128, 2, 2, true>{});
  if (dim <= 192 && problem.value_dim <= 128) {
    return launch(FlashForwardConfig<Element, 192, 128, 128, 2, 2, true>{});
  }
  return launch(FlashForwardConfig<Element, 256, 256, 80, 2, 2, true>{});
}

}  // namespace millrace::cuda
