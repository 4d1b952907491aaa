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
#include "quant/feedback.h"

namespace millrace {

// Sums of products are left out where they would take more than this for one matrix, or for all.
inline constexpr size_t kMaxProductBytes = size_t{64} << 20, kMaxProductsBytes = size_t{2} << 30;

// By GGUF name of the weight. Down projections of experts have none: their inputs are
// as many as there are experts, and a short text reaches few of them.
using Calibration = std::map<std::string, quant::MatrixInputs>;

// An executor that adds to `calibration` on its way through. The checkpoint, the config and the map must
// outlive it.
std::unique_ptr<Executor> observe_inputs(std::unique_ptr<Executor> inner, const io::Checkpoint& checkpoint,
                                         const ModelConfig& config, Calibration& calibration);

}  // namespace millrace
