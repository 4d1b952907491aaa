// Watching the inputs of products: what calibration asks of an executor. Executors that can show them derive
// from WatchableExecutor beside Executor.
#pragma once

#include <cstdint>
#include <span>

#include "backend/backend.h"

namespace millrace {

class InputWatcher {
 public:
  virtual ~InputWatcher() = default;
  // Rows that are multiplied by all of these matrices, behind whatever norm or activation stands before the
  // product. x: [rows][weights[0]->cols], rows `stride` apart. `expert`: of weights [experts, out, in]; 0 of
  // others. Routers are not shown.
  virtual void see(std::span<const Weight* const> weights, int64_t expert, const float* x, int64_t rows,
                   int64_t stride) = 0;
  // Of latent attention, whose `k_b` and `v_b` are shown head by head: what the one matrix that both are
  // parts of is multiplied with. x: [rows][rank]
  virtual void see_latent(const Weight& k_b, int64_t rank, const float* x, int64_t rows, int64_t stride) = 0;
};

class WatchableExecutor {
 public:
  virtual ~WatchableExecutor() = default;
  // From the next step on; nullptr: nobody watches. Results have the same bits.
  virtual void watch_inputs(InputWatcher* watcher) = 0;
};

}  // namespace millrace
