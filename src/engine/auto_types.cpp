#include "engine/auto_types.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/error.h"
#include "engine/divergence.h"
#include "engine/load_tokenizer.h"
#include "engine/runtime.h"
#include "engine/sample_text.h"
#include "io/gguf_types.h"
#include "io/printable.h"
#include "kernels/cpu/quant/encoder.h"
#include "quant/allocate.h"

namespace millrace {
namespace {

// The sample's inputs are seen once; its beginning is read again for each of some twenty groups.
constexpr size_t kSampleTokens = 1024, kTrialTokens = 128;
constexpr int32_t kRowsPerStep = 64;
constexpr int kBands = 3;           // thirds of the layers
constexpr int64_t kErrorRows = 64;  // of a tensor, evenly spread, that stand for it
constexpr DType kTrialType = DType::kQ4_0;
constexpr DType kCandidates[] = {DType::kMXFP4, DType::kIQ4_XS, DType::kIQ4_NL, DType::kQ4_0,
                                 DType::kQ4_Z,  DType::kQ4_K,   DType::kQ4_1,   DType::kQ5_0,
                                 DType::kQ5_K,  DType::kQ5_1,   DType::kQ6_K,   DType::kQ8_0};

// A group: one role ("ffn_down.weight") in one band of layers, or a matrix outside the layers.
std::string group_of(const std::string& name, int layers) {
  if (!name.starts_with("blk.")) return name;
  int layer = 0;
  const auto [end, error] = std::from_chars(name.data() + 4, name.data() + name.size(), layer);
  if (error != std::errc() || layers <= 0) return name;
  return fmt::format("{} {}", std::string_view(end + 1, name.data() + name.size()), layer * kBands / layers);
}

class TypeSearch {
 public:
  TypeSearch(const EngineOptions& options, std::vector<OutTensor>& tensors, bool portable)
      : engine_options_(options), tensors_(tensors), portable_(portable) {
    measure_baseline(options.quantize_sample);
    index_tensors();
  }

  AutoTypes search(size_t budget) {
    make_options();
    const size_t fixed = fixed_bytes();
    const size_t least = fixed + quant::least_bytes(options_);
    if (budget < least) {
      throw_error(ErrorCode::kBadInput,
                  "--budget: found {} bytes for the tensors, expected at least {} ({:.2f} bits per weight)",
                  budget, least, 8.0 * static_cast<double>(least) / static_cast<double>(elements()));
    }
    measure_groups();
    const std::vector<size_t> chosen = quant::allocate(options_, budget - fixed);
    AutoTypes result;
    for (size_t i = 0; i < searched_.size(); ++i) {
      tensors_[searched_[i]].type = options_[i][chosen[i]].type;
      result.expected_kl += options_[i][chosen[i]].cost;
    }
    result.calibration = std::move(calibration_);
    result.group_kl = std::move(group_kl_);
    result.sample_tokens = static_cast<int64_t>(tokens_.size());
    return result;
  }

 private:
  // The model as it is stored, on the sample's tokens.
  EngineOptions options_for_sample() const {
    EngineOptions options = engine_options_;
    options.quantize = options.quantize_budget = options.quantize_sample = "";
    options.lock = false;
    options.on_load = nullptr;
    options.context = static_cast<int32_t>(kSampleTokens);
    options.kv_type = "f32";
    options.step_tokens = kRowsPerStep;
    return options;
  }

  void measure_baseline(const std::string& sample) {
    const io::Checkpoint checkpoint = io::Checkpoint::open(engine_options_.model);
    const ModelConfig config = read_config(checkpoint);
    layers_ = config.layers;
    tokens_ = load_tokenizer(checkpoint)->encode(sample.empty() ? std::string(kSampleText) : sample);
    tokens_.resize(std::min(tokens_.size(), kSampleTokens));
    if (tokens_.size() < 16) {
      throw_error(ErrorCode::kBadInput, "--sample: found {} tokens, expected at least 16 to measure by",
                  tokens_.size());
    }
    RuntimeSetup setup{.logit_rows = kRowsPerStep};
    setup.wrap_executor = [&](std::unique_ptr<Executor> inner) {
      return observe_inputs(std::move(inner), checkpoint, config, calibration_);
    };
    const auto runtime = Runtime::open(options_for_sample(), setup);
    vocab_ = runtime->config().vocab;
    baseline_ = all_logits(*runtime, tokens_);
    for (auto& [name, inputs] : calibration_) smooth(inputs.squares);
  }

  // A column that the sample hardly uses still counts a tenth of the mean: other texts will use it.
  static void smooth(std::vector<float>& sums) {
    double mean = 0.0;
    for (const float s : sums) mean += s / static_cast<double>(sums.size());
    for (float& s : sums) s = static_cast<float>((s + 0.1 * mean) / (1.1 * std::max(mean, 1e-30)));
  }

  void index_tensors() {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      OutTensor& tensor = tensors_[i];
      tensor.type = DType::kF32;
      if (tensor.part == quant::Part::kSmall) continue;
      searched_.push_back(i);
    }
  }

  const float* importance_of(const OutTensor& tensor) const {
    const auto found = calibration_.find(tensor.name);
    return found == calibration_.end() ? nullptr : found->second.squares.data();
  }

  // Relative squared error of some rows in `type`.
  double error_in(const OutTensor& tensor, DType type) const {
    const TensorView& view = tensor.source;
    const int64_t rows = std::min(kErrorRows, view.rows());
    std::vector<std::byte> out(bytes_of(type, view.cols()));
    quant::RecodeError sum;
    for (int64_t i = 0; i < rows; ++i) {
      sum += quant::recode_rows(view, i * view.rows() / rows, 1, type, importance_of(tensor), {}, out.data());
    }
    return sum.total > 0.0 ? sum.error / sum.total : 0.0;
  }

  // What each matrix may become, with its own error as cost; measure_groups() turns that into divergence.
  void make_options() {
    ThreadPool pool(engine_options_.threads);
    options_.resize(searched_.size());
    trial_error_.resize(searched_.size());
    pool.parallel_for(static_cast<int64_t>(searched_.size()), 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) add_options(static_cast<size_t>(i));
    });
  }

  void add_options(size_t i) {
    const OutTensor& tensor = tensors_[searched_[i]];
    const DType stored = tensor.source.type == DType::kMXFP4Split ? DType::kMXFP4 : tensor.source.type;
    const auto bytes = [&](DType type) { return bytes_of(type, tensor.source.elements()); };
    if (io::gguf_of_dtype(stored)) options_[i].push_back({stored, bytes(stored), 0.0});
    if (tensor.source.data == nullptr) {  // gathered while it is written: its rows cannot be looked at here
      options_[i].push_back({quant::fitting_type(DType::kQ8_0, tensor.source.cols()),
                             bytes(quant::fitting_type(DType::kQ8_0, tensor.source.cols())), 0.0});
      return;
    }
    for (const DType type : kCandidates) {
      const bool fits = tensor.source.cols() % info(type).block_elements == 0;
      if (portable_ && type == DType::kQ4_Z) continue;
      if (!fits || bytes(type) >= bytes(stored)) continue;
      options_[i].push_back({type, bytes(type), error_in(tensor, type)});
    }
    if (options_[i].empty()) options_[i].push_back({DType::kF16, bytes(DType::kF16), 0.0});
    if (may_try(tensor)) trial_error_[i] = error_in(tensor, kTrialType);
  }

  static bool may_try(const OutTensor& tensor) {
    return tensor.source.cols() % info(kTrialType).block_elements == 0 &&
           quant::bits_per_weight(tensor.source.type) > quant::bits_per_weight(kTrialType);
  }

  void measure_groups() {
    std::map<std::string, std::vector<size_t>> groups;
    for (size_t i = 0; i < searched_.size(); ++i) {
      if (trial_error_[i] > 0.0) groups[group_of(tensors_[searched_[i]].name, layers_)].push_back(i);
    }
    size_t all_bytes = 0, done = 0;  // progress is told in bytes, as that of loading is
    for (const OutTensor& tensor : tensors_) all_bytes += tensor.source.bytes();
    for (const auto& [group, members] : groups) {
      if (engine_options_.on_load) engine_options_.on_load(all_bytes / groups.size() * done++, all_bytes);
      const double kl = divergence_of(group);
      group_kl_[group] = kl;
      double sum = 0.0;
      for (const size_t i : members) sum += trial_error_[i];
      for (const size_t i : members) {
        for (quant::TypeOption& option : options_[i]) option.cost *= kl / sum;
      }
    }
  }

  // Of the model with the matrices of `group` in the trial type.
  double divergence_of(const std::string& group) const {
    RuntimeSetup setup{.logit_rows = kRowsPerStep};
    setup.weights.choice = [&](const std::string& name, const TensorView& view, bool) {
      return group_of(name, layers_) == group ? kTrialType : view.type;
    };
    const auto runtime = Runtime::open(options_for_sample(), setup);
    const std::vector<int32_t> no_next(std::min(tokens_.size(), kTrialTokens), -1);
    const std::vector<float> logits = all_logits(*runtime, std::span(tokens_).first(no_next.size()));
    DivergenceMeter meter;
    meter.add(runtime->backend(), std::span(baseline_).first(logits.size()), logits, vocab_, no_next);
    return meter.result().mean;
  }

  size_t fixed_bytes() const {
    size_t bytes = 0;
    for (const OutTensor& tensor : tensors_) bytes += tensor.part == quant::Part::kSmall ? tensor.bytes() : 0;
    return bytes;
  }
  int64_t elements() const {
    int64_t sum = 0;
    for (const OutTensor& tensor : tensors_) sum += tensor.source.elements();
    return sum;
  }

  const EngineOptions& engine_options_;
  std::vector<OutTensor>& tensors_;
  bool portable_;
  int layers_ = 0;
  int64_t vocab_ = 0;
  std::vector<int32_t> tokens_;
  std::vector<float> baseline_;
  Calibration calibration_;
  std::map<std::string, double> group_kl_;
  std::vector<size_t> searched_;                         // indices of the matrices
  std::vector<std::vector<quant::TypeOption>> options_;  // of each of them
  std::vector<double> trial_error_;                      // 0: not tried
};

}  // namespace

size_t budget_bytes(std::string_view option, const std::string& text, int64_t elements, size_t header_bytes) {
  double value = 0.0;
  const char* end = text.data() + text.size();
  const auto [after, error] = std::from_chars(text.data(), end, value);
  const std::string unit(after, end);
  const struct {
    const char* name;
    double bytes;
  } kUnits[] = {{"", 1},    {"B", 1},    {"K", 1e3},      {"KB", 1e3},     {"M", 1e6},     {"MB", 1e6},
                {"G", 1e9}, {"GB", 1e9}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}};
  double bytes = -1.0;
  for (const auto& u : kUnits) {
    if (unit == u.name) bytes = std::max(0.0, value * u.bytes - static_cast<double>(header_bytes));
  }
  if (unit == "bpw") bytes = value * static_cast<double>(elements) / 8.0;
  if (error != std::errc() || !(value > 0.0) || bytes < 0.0 || bytes > 1e15) {
    throw_error(ErrorCode::kBadInput,
                "{}: found {}, expected bytes such as 800M or 3.5GiB, or bits per weight such as 4.5bpw",
                option, io::printable(text));
  }
  return static_cast<size_t>(bytes);
}

AutoTypes choose_types(const EngineOptions& options, size_t budget, std::vector<OutTensor>& tensors,
                       bool portable) {
  return TypeSearch(options, tensors, portable).search(budget);
}

WeightTypes auto_weight_types(const EngineOptions& options) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(options.model);
  std::optional<ModelConfig> config;
  if (checkpoint.hf) config = read_config(checkpoint);
  std::vector<OutTensor> tensors = list_tensors(checkpoint, config);
  int64_t elements = 0;
  for (const OutTensor& tensor : tensors) elements += tensor.source.elements();
  const auto chosen = std::make_shared<AutoTypes>(
      choose_types(options, budget_bytes("--budget", options.quantize_budget, elements, 0), tensors));
  const auto types = std::make_shared<std::map<std::string, DType>>();
  size_t bytes = 0;
  for (const OutTensor& tensor : tensors) {
    bytes += tensor.bytes();
    if (tensor.part != quant::Part::kSmall) types->emplace(tensor.name, tensor.type);
  }
  WeightTypes result;
  result.choice = [types](const std::string& name, const TensorView& view, bool) {
    const auto found = types->find(name);
    const bool same =
        found == types->end() || (found->second == DType::kMXFP4 && view.type == DType::kMXFP4Split);
    return same ? view.type : found->second;
  };
  result.inputs = [chosen](const std::string& name) -> const quant::MatrixInputs* {
    const auto found = chosen->calibration.find(name);
    return found == chosen->calibration.end() ? nullptr : &found->second;
  };
  result.identity =
      fmt::format("auto {} {:x}", options.quantize_budget, std::hash<std::string>{}(options.quantize_sample));
  result.note = fmt::format(
      "auto: {:.3f} bits per weight, expected divergence {:.5f} nats a token on {} tokens of sample text",
      8.0 * static_cast<double>(bytes) / static_cast<double>(elements), chosen->expected_kl,
      chosen->sample_tokens);
  return result;
}

}  // namespace millrace
