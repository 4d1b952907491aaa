// Which tiles each head size has.
#pragma once

#include "kernels/cuda/attention/flash_forward_launch.cuh"

namespace millrace::cuda {

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
