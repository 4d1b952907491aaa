#include "model/adapter.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "base/error.h"
#include "io/gguf.h"
#include "io/printable.h"
#include "io/safetensors.h"
#include "kernels/quant/codec.h"
#include "model/adapter_config.h"
#include "model/architecture.h"
#include "quant/recode.h"

namespace millrace {
namespace {

namespace fs = std::filesystem;

// A matrix of the model that a name of the file stands for; of a fused one, some of its rows.
struct Target {
  int layer = 0;
  std::string role;
  int64_t rows = 0, cols = 0;
  int64_t first_row = 0, all_rows = 0;  // of what the file names
  bool interleaved_in_gguf = false;
};
using Targets = std::map<std::string, std::vector<Target>, std::less<>>;

std::string without_weight(std::string_view name) {
  return std::string(name.ends_with(".weight") ? name.substr(0, name.size() - 7) : name);
}

// Every name that a projection of this model may have in a PEFT file (without .weight) or in a GGUF file.
Targets find_targets(const ModelConfig& config, bool gguf) {
  const Architecture& architecture = architecture_of(config);
  const HfNames hf = architecture.hf_names();
  Targets targets;
  const auto add = [&](int layer, std::string_view name, const Target& target) {
    if (name.empty()) return;
    if (gguf) {
      targets[layer < 0 ? std::string(name) : fmt::format("blk.{}.{}", layer, name)].push_back(target);
      return;
    }
    const std::string own =
        without_weight(layer < 0 ? std::string(name) : fmt::format("{}{}.{}", hf.layers, layer, name));
    targets[own].push_back(target);
    if (!hf.prefix.empty() && layer >= 0) targets[std::string(hf.prefix) + own].push_back(target);
  };
  add(-1, gguf ? "output.weight" : hf.output,
      {-1, "output.weight", config.vocab, config.hidden, 0, config.vocab, false});
  for (int l = 0; l < config.layers; ++l) {
    for (const WeightSpec& spec : architecture.layer_weights(config, l)) {
      if (spec.use != WeightUse::kDequantized || spec.shape.size() != 2) continue;
      Target target{l, std::string(spec.role), spec.shape[0],           spec.shape[1],
                    0, spec.shape[0],          spec.interleaved_in_gguf};
      add(l, gguf ? spec.role : spec.hf, target);
      for (const std::string_view other : spec.gguf) {
        if (gguf && other != spec.role) add(l, other, target);
      }
      if (!spec.part_of) continue;
      target.first_row = spec.part_of->first_row;
      target.all_rows = spec.part_of->all_rows;
      add(l, gguf ? spec.part_of->gguf : spec.part_of->hf, target);
    }
  }
  return targets;
}

std::string shape_text(const TensorView& view) {
  return fmt::format("[{}]", fmt::join(view.shape.begin(), view.shape.begin() + view.rank, ", "));
}

std::vector<float> values_of(const TensorView& view, const std::string& path) {
  std::vector<float> values(static_cast<size_t>(view.elements()));
  for (int64_t r = 0; r < view.rows(); ++r) {
    quant::dequantize_row(view, r, values.data() + r * view.cols());
  }
  if (!std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); })) {
    throw_error(ErrorCode::kBadInput, "{}: tensor {}: found NaN or infinity, expected finite values", path,
                view.name);
  }
  return values;
}

// A and B of one name of the file, and what B is multiplied by.
struct Pair {
  const TensorView* a = nullptr;
  const TensorView* b = nullptr;
};

class AdapterReader {
 public:
  AdapterReader(const AdapterOption& option, const io::Checkpoint& model, const ModelConfig& config)
      : option_(option), model_(model), config_(config) {
    adapter_.name = option.name;
    adapter_.path = option.path;
  }

  Adapter read() {
    if (fs::is_directory(option_.path)) {
      read_peft();
    } else {
      read_gguf();
    }
    if (adapter_.updates.empty()) {
      throw_error(ErrorCode::kBadInput, "{}: found no tensors, expected pairs of a low-rank adapter",
                  option_.path);
    }
    return std::move(adapter_);
  }

 private:
  [[noreturn]] void refuse(const std::string& name) const {
    throw_error(ErrorCode::kUnsupported,
                "{}: adapter of {}: expected one of this {} model's attention projections, feed-forward "
                "matrices or its output; experts, routers, embeddings and norms are not adapted",
                option_.path, io::printable(name), config_.architecture);
  }

  void read_peft() {
    const AdapterConfig peft = read_adapter_config(option_.path);
    const fs::path file = fs::path(option_.path) / "adapter_model.safetensors";
    if (!fs::exists(file)) {
      throw_error(ErrorCode::kBadInput, "{}: found nothing, expected it beside adapter_config.json",
                  file.string());
    }
    const io::Safetensors tensors = io::Safetensors::open_file(file.string());
    std::map<std::string, Pair> pairs;  // by module
    for (const TensorView& tensor : tensors.tensors()) add_peft(tensor, pairs);
    const Targets targets = find_targets(config_, /*gguf=*/false);
    for (const auto& [module, pair] : pairs) {
      const std::string known = known_module(module, targets);
      if (known.empty()) refuse(module);
      const int64_t rank = rank_of(module, pair);
      const double scale = peft.scale_of(module, rank) * option_.scale;
      take_all(module, pair, targets.at(known), scale, false);
    }
  }

  // "base_model.model.M.lora_A.weight", or with the adapter's name before the last part, to M.
  void add_peft(const TensorView& tensor, std::map<std::string, Pair>& pairs) const {
    std::string_view name = tensor.name;
    constexpr std::string_view kBefore = "base_model.model.";
    if (name.starts_with(kBefore)) name.remove_prefix(kBefore.size());
    for (const bool is_a : {true, false}) {
      const size_t at = name.rfind(is_a ? ".lora_A." : ".lora_B.");
      if (at == std::string_view::npos || !name.ends_with("weight")) continue;
      Pair& pair = pairs[std::string(name.substr(0, at))];
      const TensorView*& to = is_a ? pair.a : pair.b;
      if (to != nullptr) {
        throw_error(ErrorCode::kBadInput, "{}: tensor {}: found a second one of this module, expected one",
                    option_.path, tensor.name);
      }
      to = &tensor;
      return;
    }
    if (is_copy(tensor, name)) return;
    throw_error(ErrorCode::kUnsupported,
                "{}: tensor {}: expected lora_A and lora_B weights of projections alone", option_.path,
                tensor.name);
  }

  // PEFT adds the model's own embeddings where the output is adapted: of no use while they are the same.
  bool is_copy(const TensorView& tensor, std::string_view name) const {
    std::string own(name);
    if (const size_t at = own.find(".base_layer."); at != std::string::npos) own.erase(at, 11);
    const TensorView* found = model_.hf ? model_.find_tensor(own) : nullptr;
    return found != nullptr && found->rank == tensor.rank && found->shape == tensor.shape &&
           info(found->type).block_elements == 1 && found->type != DType::kF8E4M3 &&
           values_of(*found, model_.path()) == values_of(tensor, option_.path);
  }

  // The name among `targets`; of a model that also sees, without what stands for its text part.
  static std::string known_module(const std::string& module, const Targets& targets) {
    if (targets.contains(module)) return module;
    constexpr std::string_view kText = "language_model.";
    const size_t at = module.find(kText);
    if (at == std::string::npos) return {};
    std::string inner = module;
    inner.erase(at, kText.size());
    return targets.contains(inner) ? inner : std::string();
  }

  void read_gguf() {
    const io::Gguf file = io::Gguf::open(option_.path);
    const auto expect = [&](std::string_view key, std::string_view wanted) {
      const std::string_view found = file.get_string(key, "");
      if (found == wanted) return;
      throw_error(ErrorCode::kBadInput, "{}: {}: found {}, expected {}", option_.path, key,
                  found.empty() ? "nothing" : io::printable(found), wanted);
    };
    expect("general.type", "adapter");
    expect("adapter.type", "lora");
    expect("general.architecture", architecture_of(config_).name());
    if (file.has("adapter.alora.invocation_tokens")) {
      throw_error(ErrorCode::kUnsupported,
                  "{}: adapter.alora.invocation_tokens: found some, expected an adapter of all tokens",
                  option_.path);
    }
    const double alpha = file.get_real("adapter.lora.alpha", 0.0);
    std::map<std::string, Pair> pairs;  // by the model's tensor
    for (const TensorView& tensor : file.tensors()) {
      const std::string_view name = tensor.name;
      const bool is_a = name.ends_with(".lora_a");
      if (!is_a && !name.ends_with(".lora_b")) {
        throw_error(ErrorCode::kUnsupported, "{}: tensor {}: expected names that end in .lora_a and .lora_b",
                    option_.path, tensor.name);
      }
      Pair& pair = pairs[std::string(name.substr(0, name.size() - 7))];
      (is_a ? pair.a : pair.b) = &tensor;
    }
    const Targets targets = find_targets(config_, /*gguf=*/true);
    for (const auto& [name, pair] : pairs) {
      const auto found = targets.find(name);
      if (found == targets.end()) refuse(name);
      const auto rank = static_cast<double>(rank_of(name, pair));
      const double scale = option_.scale * (alpha != 0.0 ? alpha / rank : 1.0);
      take_all(name, pair, found->second, scale, true);
    }
  }

  int64_t rank_of(const std::string& name, const Pair& pair) const {
    if (pair.a == nullptr || pair.b == nullptr) {
      throw_error(ErrorCode::kBadInput, "{}: adapter of {}: found no {}, expected both A and B", option_.path,
                  io::printable(name), pair.a == nullptr ? "A" : "B");
    }
    for (const TensorView* tensor : {pair.a, pair.b}) {
      if (tensor->rank == 2 && tensor->type != DType::kU8 && tensor->type != DType::kI32) continue;
      throw_error(ErrorCode::kUnsupported, "{}: tensor {}: found {} {}, expected a matrix of floats",
                  option_.path, tensor->name, info(tensor->type).name, shape_text(*tensor));
    }
    const int64_t rank = pair.a->shape[0];
    if (rank < 1 || pair.b->shape[1] != rank) {
      throw_error(ErrorCode::kBadInput, "{}: tensor {}: found shape {}, expected a rank of {} as A has",
                  option_.path, pair.b->name, shape_text(*pair.b), rank);
    }
    return rank;
  }

  // Phi-3's ffn_up is gate and up in one, elsewhere it is up alone: the rows tell which.
  void take_all(const std::string& name, const Pair& pair, const std::vector<Target>& targets, double scale,
                bool from_gguf) {
    const auto fits = [&](const Target& target) { return target.all_rows == pair.b->shape[0]; };
    const bool any = std::any_of(targets.begin(), targets.end(), fits);
    for (const Target& target : targets) {
      if (fits(target) || !any) take(name, pair, target, scale, from_gguf);
    }
  }

  void take(const std::string& name, const Pair& pair, const Target& target, double scale, bool from_gguf) {
    const int64_t rank = pair.a->shape[0];
    if (pair.a->shape[1] != target.cols || pair.b->shape[0] != target.all_rows) {
      throw_error(ErrorCode::kBadInput,
                  "{}: adapter of {}: found A {} and B {}, expected [{}, {}] and [{}, {}]", option_.path,
                  io::printable(name), shape_text(*pair.a), shape_text(*pair.b), rank, target.cols,
                  target.all_rows, rank);
    }
    if (!taken_.insert({target.layer, target.role}).second) {
      throw_error(ErrorCode::kBadInput, "{}: adapter of {}: found a second one of {}, expected one",
                  option_.path, io::printable(name), target.role);
    }
    AdapterUpdate& update = adapter_.updates.emplace_back();
    update.layer = target.layer;
    update.role = target.role;
    update.name = name;
    update.rank = rank;
    update.in = target.cols;
    update.out = target.rows;
    update.a = values_of(*pair.a, option_.path);
    const std::vector<float> all = values_of(*pair.b, option_.path);
    update.b.resize(static_cast<size_t>(target.rows * rank));
    // Rotated rows lie in the order of the adapter's kind of file, and are wanted in that of the model's.
    const bool reorders = target.interleaved_in_gguf && from_gguf != model_.gguf.has_value();
    const quant::RowOrder order{reorders ? config_.head_dim : 0};
    for (int64_t r = 0; r < target.rows; ++r) {
      const int64_t from = from_gguf ? r : order.source(r), to = from_gguf ? order.source(r) : r;
      for (int64_t i = 0; i < rank; ++i) {
        update.b[static_cast<size_t>(to * rank + i)] =
            static_cast<float>(all[static_cast<size_t>((target.first_row + from) * rank + i)] * scale);
      }
    }
  }

  const AdapterOption& option_;
  const io::Checkpoint& model_;
  const ModelConfig& config_;
  Adapter adapter_;
  std::set<std::pair<int, std::string>> taken_;
};

bool is_name(std::string_view text) {
  return !text.empty() && text.size() <= 128 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '.' ||
           c == '_' || c == '-';
  });
}

}  // namespace

int64_t Adapter::max_rank() const {
  int64_t most = 0;
  for (const AdapterUpdate& update : updates) most = std::max(most, update.rank);
  return most;
}

size_t Adapter::bytes() const {
  size_t bytes = 0;
  for (const AdapterUpdate& update : updates) bytes += (update.a.size() + update.b.size()) * sizeof(float);
  return bytes;
}

AdapterOption parse_adapter_option(std::string_view option, std::string_view text) {
  const size_t equals = text.find('=');
  AdapterOption parsed;
  if (equals != std::string_view::npos) parsed.name = text.substr(0, equals);
  std::string_view path = equals == std::string_view::npos ? "" : text.substr(equals + 1);
  // The last colon begins a scale if a number is behind it: paths may have colons too.
  if (const size_t colon = path.rfind(':'); colon != std::string_view::npos) {
    const std::string_view number = path.substr(colon + 1);
    double scale = 0;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), scale);
    if (error == std::errc() && end == number.data() + number.size() && !number.empty()) {
      if (!std::isfinite(scale) || std::abs(scale) > 1e6) {
        throw_error(ErrorCode::kBadInput, "{}: found the scale {}, expected a number up to 1e6", option,
                    io::printable(number));
      }
      parsed.scale = scale;
      path = path.substr(0, colon);
    }
  }
  parsed.path = path;
  if (!is_name(parsed.name) || path.empty()) {
    throw_error(ErrorCode::kBadInput,
                "{}: found {}, expected NAME=PATH or NAME=PATH:SCALE, the name of letters, digits, '.', '_' "
                "and '-'",
                option, io::printable(text));
  }
  return parsed;
}

std::vector<AdapterOption> parse_adapter_options(std::string_view option,
                                                 const std::vector<std::string>& texts) {
  std::vector<AdapterOption> all;
  for (const std::string& text : texts) {
    AdapterOption parsed = parse_adapter_option(option, text);
    if (std::any_of(all.begin(), all.end(), [&](const AdapterOption& o) { return o.name == parsed.name; })) {
      throw_error(ErrorCode::kBadInput, "{}: found the name {} twice, expected each once", option,
                  parsed.name);
    }
    all.push_back(std::move(parsed));
  }
  return all;
}

Adapter read_adapter(const AdapterOption& option, const io::Checkpoint& model, const ModelConfig& config) {
  return AdapterReader(option, model, config).read();
}

}  // namespace millrace
