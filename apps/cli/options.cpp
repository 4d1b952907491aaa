#include "options.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/mapped_file.h"
#include "engine/engine_options.h"
#include "interrupt.h"
#include "io/printable.h"
#include "output.h"
#include "progress.h"

namespace millrace::cli {

void add_model_path(Command& command, ModelOptions& options) {
  command.option("MODEL", options.path, "GGUF file or Hugging Face directory").required();
}

void add_device_options(Command& command, ModelOptions& options) {
  command
      .option(
          "--device", options.device,
          "cpu, cuda, cuda:N (one of several GPUs) or reference (slow, exact); auto: a GPU with room for the "
          "model, else the CPU")
      .show_default();
  command.option("--gpu-memory", options.gpu_memory, "part of a GPU's free memory that may be taken")
      .range(0.01, 1.0)
      .show_default();
  command.option("--threads", options.threads, "CPU threads; 0: all that this process may use")
      .range(0, 1024)
      .show_default();
  command
      .option("--ctx", options.context, "tokens of context; 0: what the model was trained for, at most 4096")
      .range(0, 1 << 28)
      .show_default();
  command.option("--kv-type", options.kv_type,
                 "type of the KV cache: f32, f16, bf16, int8 or fp8; default: the device's");
  command.flag("--lock", options.lock, "keep the model in memory: none of it may be paged out");
}

void tell_device(const std::string& note) {
  if (!note.empty()) write_stderr(fmt::format("millrace: {}\n", note));
}

void add_quantize_option(Command& command, ModelOptions& options) {
  command.option("--quantize", options.quantize,
                 "quantize the weights while loading: " + quant::request_names() + " auto");
  command.option("--budget", options.budget,
                 "for --quantize auto: 4.5bpw (bits per weight) or 800M (the weights)");
  command.option("--sample", options.sample, "for --quantize auto: a text to measure by; -: standard input");
}

RuntimeOptions runtime_options(const ModelOptions& options) {
  RuntimeOptions runtime;
  runtime.device = options.device;
  runtime.threads = options.threads;
  runtime.gpu_memory = options.gpu_memory;
  if (options.gpu_memory != ModelOptions().gpu_memory &&
      (options.device == "cpu" || options.device == "reference")) {
    throw_error(ErrorCode::kBadInput, "--gpu-memory: found --device {}, expected a GPU or auto",
                options.device);
  }
  runtime.context = options.context;
  runtime.lock = options.lock;
  if (!options.kv_type.empty()) {
    runtime.kv_type = parse_kv_type("--kv-type", options.kv_type);
  }
  if ((options.quantize == "auto") == options.budget.empty()) {
    throw_error(ErrorCode::kBadInput, "--budget: found {}, expected {}",
                options.budget.empty() ? "none" : io::printable(options.budget),
                options.quantize == "auto" ? "one for --quantize auto, such as 4.5bpw or 800M"
                                           : "it with --quantize auto only");
  }
  if (options.quantize != "auto" && !options.sample.empty()) {
    throw_error(ErrorCode::kBadInput, "--sample: found {}, expected it with --quantize auto only",
                io::printable(options.sample));
  }
  if (options.quantize == "auto") {
    runtime.quantize_auto = {options.budget,
                             options.sample.empty() ? std::string() : read_input(options.sample)};
  } else if (!options.quantize.empty()) {
    runtime.quantize = type_choice(quant::parse_request("--quantize", options.quantize));
  }
  return runtime;
}

EngineOptions engine_options(const ModelOptions& options) {
  const RuntimeOptions runtime = runtime_options(options);  // a mistake is told under the option's own name
  EngineOptions engine;
  engine.model = options.path;
  engine.device = options.device;
  engine.threads = options.threads;
  engine.gpu_memory = options.gpu_memory;
  engine.context = options.context;
  engine.kv_type = options.kv_type;
  engine.quantize = options.quantize;
  engine.quantize_budget = options.budget;
  if (runtime.quantize_auto) engine.quantize_sample = runtime.quantize_auto->sample;
  engine.lock = options.lock;
  return engine;
}

std::unique_ptr<Runtime> open_runtime(const ModelOptions& options,
                                      const std::function<void(RuntimeOptions&)>& adjust) {
  RuntimeOptions runtime = runtime_options(options);
  Progress progress(options.quantize.empty() ? "loading" : "quantizing");
  runtime.progress = [&](size_t done, size_t total) { progress.update(done, total); };
  if (adjust) adjust(runtime);
  std::unique_ptr<Runtime> opened = Runtime::open(options.path, runtime);
  progress.clear();
  tell_device(opened->device_note());
  tell_quantized(opened->quantized());
  return opened;
}

void tell_quantized(const std::string& chosen) {
  if (!chosen.empty()) fmt::print(stderr, "{}\n", chosen);
}

void add_sampling_options(Command& command, SamplingOptions& options) {
  SamplingParams& p = options.params;
  ModelInfo::Sampling& given = options.given;
  const auto add = [&](const char* name, auto& value, const char* help) {
    command.option(name, value, help).show_default().group("Sampling, in this order");
  };
  add("--repeat-penalty", given.repetition_penalty,
      "of tokens in prompt and answer; 1: none; default: the model's, else 1");
  add("--frequency-penalty", p.frequency_penalty, "for each time a token was generated");
  add("--presence-penalty", p.presence_penalty, "for a token that was generated at all");
  add("--logit-bias", options.biases, "ID=BIAS, added to that token's logit; may be repeated");
  add("--temp", given.temperature,
      "temperature; 0: always the likeliest token; default: the model's, else 0.7");
  add("--top-k", given.top_k, "keep the K likeliest tokens; 0: all; default: the model's, else all");
  add("--top-p", given.top_p,
      "keep the likeliest tokens that make up this probability; default: the model's, else 0.95");
  add("--min-p", given.min_p,
      "keep tokens at least this times as likely as the likeliest; default: the model's, else 0");
  add("--seed", p.seed, "same seed, same text; default: a new one each time");
}

SamplingParams sampling_params(const SamplingOptions& options, const ModelInfo::Sampling& advised) {
  SamplingParams params = options.params;
  const auto choose = [](auto& value, const auto& given, const auto& model, auto otherwise) {
    value = given ? *given : model.value_or(otherwise);
  };
  const ModelInfo::Sampling& given = options.given;
  choose(params.temperature, given.temperature, advised.temperature, 0.7f);
  choose(params.top_p, given.top_p, advised.top_p, 0.95f);
  choose(params.top_k, given.top_k, advised.top_k, 0);
  choose(params.min_p, given.min_p, advised.min_p, 0.0f);
  choose(params.repetition_penalty, given.repetition_penalty, advised.repetition_penalty, 1.0f);
  for (const std::string& bias : options.biases) {
    int32_t token = 0;
    float value = 0.0f;
    const char* end = bias.data() + bias.size();
    const auto [after_id, id_error] = std::from_chars(bias.data(), end, token);
    bool good = id_error == std::errc() && after_id != end && *after_id == '=';
    if (good) {
      const auto [after, error] = std::from_chars(after_id + 1, end, value);
      good = error == std::errc() && after == end;
    }
    if (!good) {
      throw_error(ErrorCode::kBadInput, "--logit-bias: found {}, expected ID=BIAS such as 42=-1.5",
                  io::printable(bias));
    }
    params.logit_bias[token] = value;
  }
  return params;
}

std::string read_input(const std::string& path) {
  if (path != "-") return read_text_file(path);
  std::string text;
  std::array<char, 1 << 16> buffer;
  while (true) {
    const ssize_t n = ::read(STDIN_FILENO, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) {
      throw_if_interrupted();
      continue;
    }
    if (n < 0) throw_error(ErrorCode::kIo, "standard input: cannot read: {}", std::strerror(errno));
    if (n == 0) return text;
    text.append(buffer.data(), static_cast<size_t>(n));
  }
}

std::vector<int32_t> parse_tokens(const std::string& text) {
  const bool from_file = !text.empty() && text[0] == '@';
  const std::string list = from_file ? read_input(text.substr(1)) : text;
  const std::string where = from_file ? text.substr(1) : "token list";
  constexpr std::string_view kSeparators = ", \t\r\n[]";  // a JSON array reads too
  std::vector<int32_t> tokens;
  size_t begin = 0;
  while ((begin = list.find_first_not_of(kSeparators, begin)) != std::string::npos) {
    const size_t end = std::min(list.find_first_of(kSeparators, begin), list.size());
    const std::string_view word = std::string_view(list).substr(begin, end - begin);
    int32_t token = 0;
    const auto [after, error] = std::from_chars(word.data(), word.data() + word.size(), token);
    if (error != std::errc() || after != word.data() + word.size() || token < 0) {
      throw_error(ErrorCode::kBadInput, "{}: token {}: found {}, expected an id such as 42", where,
                  tokens.size(), io::printable(word));
    }
    tokens.push_back(token);
    begin = end;
  }
  if (tokens.empty())
    throw_error(ErrorCode::kBadInput, "{}: found no token ids, expected at least one", where);
  return tokens;
}

}  // namespace millrace::cli
