// Options that several commands share, and what they turn into.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "command.h"
#include "engine/runtime.h"
#include "millrace/engine.h"
#include "sample/sampler.h"

namespace millrace::cli {

struct ModelOptions {
  std::string path;
  std::string device = "auto";
  double gpu_memory = 0.9;
  int threads = 0;
  int32_t context = 0;
  std::string kv_type;
  bool lock = false;
  std::string quantize, budget, sample;  // the last two for "auto"; sample names a file
};
void add_model_path(Command& command, ModelOptions& options);
void add_device_options(Command& command,
                        ModelOptions& options);  // --device --gpu-memory --threads --ctx --kv-type --lock
// What there is to say of the device, if anything: "auto" did not find a GPU and why, a tuning file is not
// used.
void tell_device(const std::string& note);
void add_quantize_option(Command& command, ModelOptions& options);  // --quantize --budget --sample
// What --quantize auto chose and what that costs, on standard error.
void tell_quantized(const std::string& chosen);
// As a RuntimeOptions. Throws Error for a kv type there is not.
RuntimeOptions runtime_options(const ModelOptions& options);
// As an EngineOptions, equally checked; the rest of it is as it comes.
EngineOptions engine_options(const ModelOptions& options);
// Loads the model behind a progress bar; `adjust` may change what the options do not say.
std::unique_ptr<Runtime> open_runtime(const ModelOptions& options,
                                      const std::function<void(RuntimeOptions&)>& adjust = {});

struct SamplingOptions {
  SamplingParams params;            // but for what is given here:
  ModelInfo::Sampling given;        // what the user said goes before what the model's makers advise
  std::vector<std::string> biases;  // "ID=BIAS"
};
void add_sampling_options(Command& command, SamplingOptions& options);
// Throws Error for a bias that is none. Without word from user or model: temperature 0.7, top-p 0.95.
SamplingParams sampling_params(const SamplingOptions& options, const ModelInfo::Sampling& advised = {});

// The bytes of a file, or of standard input for "-".
std::string read_input(const std::string& path);
// "1,2,3", "1 2 3" or "@file" holding such a list. Throws Error naming the piece that is no token id.
std::vector<int32_t> parse_tokens(const std::string& text);

}  // namespace millrace::cli
