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

#include "engine/calibration.h"
#include "engine/out_tensors.h"
#include "engine/runtime_setup.h"
#include "millrace/options.h"

namespace millrace {

struct AutoTypes {
  Calibration calibration;
  double expected_kl = 0.0;  // nats per token on the sample, by the sum of shares; error feedback lowers it
  int64_t sample_tokens = 0;
  std::map<std::string, double> group_kl;  // of each group alone in the trial type
};

// "4.5bpw" of `elements` weights, or bytes of a whole file with a header of so many: "800M", "3.5GiB",
// "1000000". Throws Error{kBadInput}; `option` names where it was given.
size_t budget_bytes(std::string_view option, const std::string& text, int64_t elements, size_t header_bytes);

// Sets the type of every matrix of `tensors`, which are options.model's, so that their data takes at most
// `budget` bytes. Of the options: device and threads to measure on, quantize_sample, and on_load, which is
// told of the progress. `portable`: types of our own are not taken. Throws Error{kBadInput} with the least
// that is possible when the budget cannot be met.
AutoTypes choose_types(const EngineOptions& options, size_t budget, std::vector<OutTensor>& tensors,
                       bool portable = false);

// The same for weights that are quantized while they are loaded, within options.quantize_budget.
WeightTypes auto_weight_types(const EngineOptions& options);

}  // namespace millrace
