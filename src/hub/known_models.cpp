// Short names: a line per model, of architectures that Millrace loads. Sizes are asked from the hub, never
// kept here. The repositories are those that publish GGUF files of the model, its maker's own where there is
// one.
#include "hub/known_models.h"

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <system_error>

#include "hub/model_name.h"
#include "hub/quant_label.h"

namespace millrace::hub {
namespace {

constexpr const char* kApache = "Apache-2.0";
constexpr const char* kLlama31 = "Llama 3.1 Community License";
constexpr const char* kLlama32 = "Llama 3.2 Community License";

const std::vector<KnownModel>& table() {
  static const std::vector<KnownModel> models = {
      {"gpt-oss-20b", "hf:ggml-org/gpt-oss-20b-GGUF:MXFP4", kApache},
      {"gpt-oss-120b", "hf:ggml-org/gpt-oss-120b-GGUF:MXFP4", kApache},
      {"qwen3-0.6b", "hf:Qwen/Qwen3-0.6B-GGUF:Q8_0", kApache},
      {"qwen3-1.7b", "hf:Qwen/Qwen3-1.7B-GGUF:Q8_0", kApache},
      {"qwen3-4b", "hf:Qwen/Qwen3-4B-GGUF:Q4_K_M", kApache},
      {"qwen3-8b", "hf:Qwen/Qwen3-8B-GGUF:Q4_K_M", kApache},
      {"qwen3-14b", "hf:Qwen/Qwen3-14B-GGUF:Q4_K_M", kApache},
      {"qwen3-32b", "hf:Qwen/Qwen3-32B-GGUF:Q4_K_M", kApache},
      {"qwen3-30b-a3b", "hf:Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", kApache},
      {"qwen2.5-0.5b", "hf:Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M", kApache},
      {"qwen2.5-1.5b", "hf:Qwen/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M", kApache},
      {"qwen2.5-7b", "hf:Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M", kApache},
      {"qwen2.5-coder-7b", "hf:Qwen/Qwen2.5-Coder-7B-Instruct-GGUF:Q4_K_M", kApache},
      {"llama-3.2-1b", "hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", kLlama32},
      {"llama-3.2-3b", "hf:bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", kLlama32},
      {"llama-3.1-8b", "hf:bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M", kLlama31},
      {"smollm2-135m", "hf:bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M", kApache},
      {"smollm2-360m", "hf:bartowski/SmolLM2-360M-Instruct-GGUF:Q4_K_M", kApache},
      {"smollm2-1.7b", "hf:bartowski/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M", kApache},
  };
  return models;
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return out;
}

// How many letters to put in, take out or change (Levenshtein).
size_t edits(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({change, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

// "gpt-oss-20b-mxfp4" is gpt-oss-20b: the name itself, or with a quantization behind it.
bool bears_name(std::string_view stem, std::string_view name) {
  if (!stem.starts_with(name)) return false;
  std::string_view rest = stem.substr(name.size());
  if (rest.empty()) return true;
  if (rest[0] != '-' && rest[0] != '.' && rest[0] != '_') return false;
  rest.remove_prefix(1);
  return lower(quant_label(rest)) == rest;
}

}  // namespace

const std::vector<KnownModel>& known_models() { return table(); }

const KnownModel* find_known(std::string_view name) {
  const std::string wanted = lower(name);
  const auto found =
      std::find_if(table().begin(), table().end(), [&](const KnownModel& m) { return m.name == wanted; });
  return found == table().end() ? nullptr : &*found;
}

std::string find_in_folders(const KnownModel& model, const std::vector<std::string>& folders) {
  namespace fs = std::filesystem;
  const std::optional<ModelName> name = parse_name(model.hub);
  std::string published = lower(name->repo.substr(name->repo.find('/') + 1));
  if (published.ends_with("-gguf")) published.resize(published.size() - 5);
  std::string best;
  int best_rank = kUnloadable;
  for (const std::string& folder : folders) {
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
      const std::string file = entry.path().filename().string();
      const PartName part = part_name(file);
      const std::string stem = lower(part.prefix);
      if (!file.ends_with(".gguf") || part.part != 1 || !entry.is_regular_file(error)) continue;
      if (!bears_name(stem, model.name) && !bears_name(stem, published)) continue;
      const int rank = label_rank(quant_label(file));
      if (rank >= best_rank) continue;
      best_rank = rank;
      best = entry.path().lexically_normal().string();
    }
    if (!best.empty()) return best;  // the first folder that has one
  }
  return best;
}

std::vector<std::string_view> similar_names(std::string_view name) {
  const std::string wanted = lower(name);
  std::vector<std::pair<size_t, std::string_view>> near;
  for (const KnownModel& model : table()) {
    const bool part = wanted.size() >= 3 && (model.name.find(wanted) != std::string_view::npos ||
                                             wanted.find(model.name) != std::string_view::npos);
    const size_t distance = part ? 1 : edits(wanted, model.name);
    if (distance <= std::max<size_t>(2, wanted.size() / 3)) near.emplace_back(distance, model.name);
  }
  std::stable_sort(near.begin(), near.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string_view> names;
  for (size_t i = 0; i < std::min<size_t>(3, near.size()); ++i) names.push_back(near[i].second);
  return names;
}

}  // namespace millrace::hub
