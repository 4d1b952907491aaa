// The types of `--type auto`: per tensor, by what they do to the model's output on a sample text.
//
// Two measurements. How much each type disturbs a matrix's own output: the error of the encoded weights,
// weighed by the squares of the inputs that the sample brings (calibration.h), relative to the weights' own.
// And what a disturbance there does to the logits: the matrices of one role in one third of the layers are
// quantized and the divergence from the original's logits is taken. The divergence of a tensor in a type is
// its share of its group's; shares add up, and quant::allocate() spends the budget where it buys most.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "options.h"
#include "quantize/calibration.h"
#include "quantize/tensors.h"

namespace millrace::cli {

struct AutoTypes {
  Calibration calibration;
  double expected_kl = 0.0;  // nats per token on the sample, by the sum of shares; error feedback lowers it
  int64_t sample_tokens = 0;
  std::map<std::string, double> group_kl;  // of each group alone in the trial type
};

// Sets the type of every matrix of `tensors` so that their data takes at most `budget` bytes. Throws
// Error{kBadInput} with the least that is possible when it cannot be met.
AutoTypes choose_types(const ModelOptions& model, const std::string& sample, size_t budget,
                       std::vector<OutTensor>& tensors);

}  // namespace millrace::cli
