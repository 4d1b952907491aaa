// Calibration: what the inputs of each matrix look like on a sample text. An error in a column of weights
// reaches the output multiplied by that column's input, so the sum of its squares is the column's importance.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/thread_pool.h"
#include "io/checkpoint.h"
#include "model/config.h"

namespace millrace::cli {

struct Inputs {
  std::vector<float> squares;  // [cols]
  // [cols, cols], the part with j >= i: sums of x_i x_j, for quant::ErrorFeedback. Matrices of the same input
  // share them. Absent where they would take more than kMaxProductBytes each or kMaxProductsBytes in all.
  std::shared_ptr<std::vector<float>> products;
};
inline constexpr size_t kMaxProductBytes = size_t{64} << 20, kMaxProductsBytes = size_t{2} << 30;

// By GGUF name of the weight. Down projections of experts have none: their inputs are
// as many as there are experts, and a short text reaches few of them.
using Calibration = std::map<std::string, Inputs>;

// An executor that adds to `calibration` on its way through. The checkpoint, the config and the map must
// outlive it.
std::unique_ptr<Executor> observe_inputs(std::unique_ptr<Executor> inner, const io::Checkpoint& checkpoint,
                                         const ModelConfig& config, Calibration& calibration);

}  // namespace millrace::cli
