// Which tiles each head size has.
#pragma once

#include "kernels/cuda/attention/flash_forward.cuh"
#include "kernels/cuda/attention/flash_forward_call.h"

namespace millrace::cuda {

template <class Element>
void launch_flash_forward_dims(const FlashForwardCall& call, const Launch& at) {
  const mr_flash_problem& problem = call.problem;
  FlashForwardParams p{};
  p.shape = flash_shape(problem);
  p.schedule = {call.counter, call.tile_starts, 0, problem.heads, 0};
  p.out_strides = flash_strides(call.out, problem.cu_q != nullptr);
  p.out = call.out.data;
  p.lse = call.lse;
  const auto launch = [&]<class Config>(Config) {
    launch_flash_forward_as<Config>(p, problem, call.q, call.k, call.v, at);
  };
  // More keys a tile pay where no tile is masked.
  const bool whole = problem.window_left < 0 && problem.window_right < 0 && problem.pages == nullptr;
  switch (problem.head_dim) {
    case 64:
      return launch(FlashForwardConfig<Element, 64, 64, 128, 3, 4, false>{});
    case 96:
      return launch(FlashForwardConfig<Element, 96, 96, 128, 2, 2, true>{});
    case 128:
      if (whole) return launch(FlashForwardConfig<Element, 128, 128, 176, 2, 2, true>{});
      return launch(FlashForwardConfig<Element, 128, 128, 128, 2, 2, true>{});
    case 192:
      return launch(FlashForwardConfig<Element, 192, 128, 128, 2, 2, true>{});
    default:
      return launch(FlashForwardConfig<Element, 256, 256, 80, 2, 2, true>{});
  }
}

}  // namespace millrace::cuda
