// How tokens are chosen: the options of `run` and `chat`, and what they turn into.
#pragma once

#include <string>
#include <vector>

#include "command.h"
#include "millrace/engine.h"

namespace millrace::cli {

struct SamplingOptions {
  SamplingParams params;            // but for what is given here:
  ModelInfo::Sampling given;        // what the user said goes before what the model's makers advise
  std::vector<std::string> biases;  // "ID=BIAS"
};
void add_sampling_options(Command& command, SamplingOptions& options);
// Throws Error for a bias that is none. Without word from user or model: temperature 0.7, top-p 0.95.
SamplingParams sampling_params(const SamplingOptions& options, const ModelInfo::Sampling& advised = {});

}  // namespace millrace::cli
