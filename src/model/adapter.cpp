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
  int64_t experts = 0;   // 0: a plain matrix
  int64_t expert = -1;   // of these, the one that the file names; -1: all
  int64_t row_step = 1;  // of what the file names, rows first_row, first_row + row_step ..
};
using Targets = std::map<std::string, std::vector<Target>, std::less<>>;

std::string without_weight(std::string_view name) {
  return std::string(name.ends_with(".weight") ? name.substr(0, name.size() - 7) : name);
}

// Of experts' matrices: those of each alone, and of all in one, with gate and up beside one another or not.
template <class Add>
void add_expert_targets(int layer, const WeightSpec& spec, bool gguf, const Add& add) {
  Target target{.layer = layer,
                .role = std::string(spec.role),
                .rows = spec.shape[1],
                .cols = spec.shape[2],
                .all_rows = spec.shape[1],
                .experts = spec.shape[0]};
  if (gguf) {
    add(layer, spec.role, target);
    const bool up = spec.role.starts_with("ffn_up_exps");
    if (!up && !spec.role.starts_with("ffn_gate_exps")) return;
    target.first_row = up ? target.rows : 0;
    target.all_rows = 2 * target.rows;
    return add(layer, "ffn_gate_up_exps.weight", target);
  }
  const HfExperts& hf = *spec.experts;
  for (int64_t e = 0; !hf.single.empty() && e < target.experts; ++e) {
    target.expert = e;
    add(layer, fmt::format("{}{}.{}", hf.before, e, hf.single), target);
  }
  target.expert = -1;
  target.first_row = hf.first_row;
  target.row_step = hf.row_step;
  target.all_rows = target.rows * std::max(hf.parts, hf.row_step);
  if (!hf.stacked.empty()) add(layer, hf.stacked, target);
  if (!hf.fused.empty()) add(layer, fmt::format("{}{}", hf.before, hf.fused), target);
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
      {.layer = -1,
       .role = "output.weight",
       .rows = config.vocab,
       .cols = config.hidden,
       .all_rows = config.vocab});
  for (int l = 0; l < config.layers; ++l) {
    for (const WeightSpec& spec : architecture.layer_weights(config, l)) {
      if (spec.experts && spec.shape.size() == 3) add_expert_targets(l, spec, gguf, add);
      if (spec.use != WeightUse::kDequantized || spec.shape.size() != 2) continue;
      Target target{.layer = l,
                    .role = std::string(spec.role),
                    .rows = spec.shape[0],
                    .cols = spec.shape[1],
                    .all_rows = spec.shape[0],
                    .interleaved_in_gguf = spec.interleaved_in_gguf};
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
    join_experts();
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
                "matrices, experts or its output; routers, embeddings and norms are not adapted",
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
      const std::string parameter = parameter_of(module, peft, targets);
      const std::string& own = parameter.empty() ? module : parameter;
      const std::string known = known_module(own, targets);
      if (known.empty()) refuse(module);
      const std::vector<Target>& all = targets.at(known);
      const bool experts = all.front().experts > 0 && all.front().expert < 0;
      const int64_t rank = rank_of(module, pair, experts ? all.front().experts : 1);
      // A matrix that is named as a parameter is one in the patterns too.
      const bool matrix = parameter.empty() && peft.names_parameter(module + ".weight");
      const double scale = peft.scale_of(matrix ? module + ".weight" : own, rank) * option_.scale;
      take_all(module, pair, all, scale, false);
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
    if (found == nullptr && model_.hf) {  // of a tied model the output is the embedding
      const HfNames names = find_architecture(model_).hf_names();
      if (own == names.output) found = model_.find_tensor(std::string(names.embedding));
    }
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

  // Parameters of experts that PEFT wraps lie around one another in its file, the class's last one outermost:
  // "mlp.experts.base_layer" is gate_up_proj where "mlp.experts" is down_proj, and is missing where that is
  // alone. Nothing: the module is none of those.
  static std::string parameter_of(const std::string& module, const AdapterConfig& peft,
                                  const Targets& targets) {
    constexpr std::string_view kInner = ".base_layer";
    std::string_view outer = module;
    size_t depth = 0;
    for (; outer.ends_with(kInner); ++depth) outer.remove_suffix(kInner.size());
    std::vector<std::string> named;
    for (const char* name : {"gate_up_proj", "up_proj", "down_proj"}) {
      std::string full = fmt::format("{}.{}", outer, name);
      if (peft.names_parameter(full) && !known_module(full, targets).empty())
        named.push_back(std::move(full));
    }
    return depth < named.size() ? named[named.size() - 1 - depth] : std::string();
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
      const auto rank = static_cast<double>(found->second.front().experts > 0
                                                ? stacked_rank(name, pair, found->second.front().experts)
                                                : rank_of(name, pair));
      const double scale = option_.scale * (alpha != 0.0 ? alpha / rank : 1.0);
      take_all(name, pair, found->second, scale, true);
    }
  }

  void check_both(const std::string& name, const Pair& pair, int dims) const {
    if (pair.a == nullptr || pair.b == nullptr) {
      throw_error(ErrorCode::kBadInput, "{}: adapter of {}: found no {}, expected both A and B", option_.path,
                  io::printable(name), pair.a == nullptr ? "A" : "B");
    }
    for (const TensorView* tensor : {pair.a, pair.b}) {
      if (tensor->rank == dims && tensor->type != DType::kU8 && tensor->type != DType::kI32) continue;
      throw_error(ErrorCode::kUnsupported, "{}: tensor {}: found {} {}, expected a matrix of floats{}",
                  option_.path, tensor->name, info(tensor->type).name, shape_text(*tensor),
                  dims == 3 ? " of each expert" : "");
    }
  }

  // Of experts in one A [experts * rank, in] and B [out, rank * experts], each expert's.
  int64_t rank_of(const std::string& name, const Pair& pair, int64_t experts = 1) const {
    check_both(name, pair, 2);
    const int64_t all = pair.a->shape[0];
    if (all < 1 || pair.b->shape[1] != all || all % experts != 0) {
      throw_error(ErrorCode::kBadInput, "{}: tensor {}: found shape {}, expected a rank of {} as A has{}",
                  option_.path, pair.b->name, shape_text(*pair.b), all,
                  experts > 1 ? fmt::format(", for {} experts", experts) : "");
    }
    return all / experts;
  }

  // Of A [experts, rank, in] and B [experts, out, rank].
  int64_t stacked_rank(const std::string& name, const Pair& pair, int64_t experts) const {
    check_both(name, pair, 3);
    const int64_t rank = pair.a->shape[1];
    if (pair.a->shape[0] != experts || pair.b->shape[0] != experts || rank < 1 || pair.b->shape[2] != rank) {
      throw_error(ErrorCode::kBadInput,
                  "{}: adapter of {}: found A {} and B {}, expected [{}, rank, in] and [{}, out, rank]",
                  option_.path, io::printable(name), shape_text(*pair.a), shape_text(*pair.b), experts,
                  experts);
    }
    return rank;
  }

  // Phi-3's ffn_up is gate and up in one, elsewhere it is up alone: the rows tell which.
  void take_all(const std::string& name, const Pair& pair, const std::vector<Target>& targets, double scale,
                bool from_gguf) {
    const int64_t rows = pair.b->shape[pair.b->rank - 2];
    const auto fits = [&](const Target& target) { return target.all_rows == rows; };
    const bool any = std::any_of(targets.begin(), targets.end(), fits);
    for (const Target& target : targets) {
      if (!fits(target) && any) continue;
      if (target.experts > 0) {
        take_experts(name, pair, target, scale);
      } else {
        take(name, pair, target, scale, from_gguf);
      }
    }
  }

  // What the file has of one expert's A [rank, in] and B [out, rank].
  struct ExpertPart {
    int64_t rank = 0;
    std::vector<float> a, b;
  };
  struct ExpertParts {
    std::string name;
    int64_t in = 0, out = 0;
    std::vector<ExpertPart> of;  // [experts]
  };

  void take_experts(const std::string& name, const Pair& pair, const Target& target, double scale) {
    const bool stacked = pair.a->rank == 3, all = target.expert < 0;
    const int64_t count = all ? target.experts : 1;
    const int64_t rank = stacked ? pair.a->shape[1] : pair.a->shape[0] / count;
    const int64_t in = pair.a->cols(), rows = pair.b->shape[stacked ? 1 : 0];
    if (in != target.cols || rows != target.all_rows) {
      throw_error(ErrorCode::kBadInput,
                  "{}: adapter of {}: found A {} and B {}, expected {} columns and {} rows", option_.path,
                  io::printable(name), shape_text(*pair.a), shape_text(*pair.b), target.cols,
                  target.all_rows);
    }
    ExpertParts& parts = experts_[{target.layer, target.role}];
    parts.name = name;
    parts.in = target.cols;
    parts.out = target.rows;
    parts.of.resize(static_cast<size_t>(target.experts));
    const std::vector<float> a = values_of(*pair.a, option_.path), b = values_of(*pair.b, option_.path);
    for (int64_t i = 0; i < count; ++i) {
      ExpertPart& part = parts.of[static_cast<size_t>(all ? i : target.expert)];
      if (part.rank != 0) {
        throw_error(ErrorCode::kBadInput, "{}: adapter of {}: found a second one of {}, expected one",
                    option_.path, io::printable(name), target.role);
      }
      part.rank = rank;
      part.a.assign(a.begin() + i * rank * in, a.begin() + (i + 1) * rank * in);
      part.b.resize(static_cast<size_t>(target.rows * rank));
      for (int64_t r = 0; r < target.rows; ++r) {
        const int64_t row = target.first_row + r * target.row_step;
        for (int64_t j = 0; j < rank; ++j) {
          // PEFT's B has the experts of a rank side by side.
          const int64_t at = stacked ? (i * rows + row) * rank + j : (row * rank + j) * count + i;
          part.b[static_cast<size_t>(r * rank + j)] = static_cast<float>(b[static_cast<size_t>(at)] * scale);
        }
      }
    }
  }

  // Experts of several files' names become one update, of the largest rank.
  void join_experts() {
    for (auto& [place, parts] : experts_) {
      AdapterUpdate& update = adapter_.updates.emplace_back();
      update.layer = place.first;
      update.role = place.second;
      update.name = parts.name;
      update.in = parts.in;
      update.out = parts.out;
      update.experts = std::ssize(parts.of);
      for (const ExpertPart& part : parts.of) update.rank = std::max(update.rank, part.rank);
      update.a.resize(static_cast<size_t>(update.experts * update.rank * update.in));
      update.b.resize(static_cast<size_t>(update.experts * update.out * update.rank));
      for (int64_t e = 0; e < update.experts; ++e) {
        const ExpertPart& part = parts.of[static_cast<size_t>(e)];
        std::copy(part.a.begin(), part.a.end(), update.a.begin() + e * update.rank * update.in);
        for (int64_t r = 0; r < update.out; ++r) {
          std::copy_n(part.b.begin() + r * part.rank, part.rank,
                      update.b.begin() + (e * update.out + r) * update.rank);
        }
      }
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
  std::map<std::pair<int, std::string>, ExpertParts> experts_;  // by layer and role
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

bool Adapter::adapts_experts() const {
  return std::any_of(updates.begin(), updates.end(), [](const AdapterUpdate& u) { return u.experts > 0; });
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
