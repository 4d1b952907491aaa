// Finding out what a path is, and gathering the files of a Hugging Face directory.
#include "io/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/mapped_file.h"
#include "io/hf_directory.h"
#include "io/json_file.h"
#include "io/printable.h"

namespace millrace::io {
namespace {

namespace fs = std::filesystem;

std::string in_dir(const std::string& directory, const char* name) {
  return (fs::path(directory) / name).string();
}

bool exists(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

nlohmann::json optional_json(const std::string& path) {
  return exists(path) ? read_json_object(path) : nlohmann::json();
}

std::string optional_text(const std::string& path) {
  return exists(path) ? read_text_file(path) : std::string();
}

// tokenizer_config.json holds one template, or a list of {"name", "template"} of which "default" counts.
std::string template_of(const nlohmann::json& tokenizer_config, const std::string& path) {
  if (!tokenizer_config.is_object()) return {};
  const auto found = tokenizer_config.find("chat_template");
  if (found == tokenizer_config.end() || found->is_null()) return {};
  if (found->is_string()) return found->get<std::string>();
  if (!found->is_array()) {
    throw_error(ErrorCode::kBadInput, "{}: chat_template: found {}, expected a string or a list of templates",
                path, found->type_name());
  }
  for (const nlohmann::json& entry : *found) {
    if (!entry.is_object()) continue;
    const auto name = entry.find("name");
    const auto text = entry.find("template");
    if (name != entry.end() && *name == "default" && text != entry.end() && text->is_string()) {
      return text->get<std::string>();
    }
  }
  return {};
}

// Older GPTQ and AWQ directories say what they are in a file of their own.
void add_quantization(HfDirectory& hf) {
  if (hf.config.contains("quantization_config")) return;
  constexpr std::pair<const char*, const char*> kFiles[] = {{"quantize_config.json", "gptq"},
                                                            {"quant_config.json", "awq"}};
  for (const auto& [file, method] : kFiles) {
    nlohmann::json config = optional_json(in_dir(hf.path, file));
    if (config.is_null()) continue;
    config.emplace("quant_method", method);
    hf.config["quantization_config"] = std::move(config);
    return;
  }
}

// The configuration of the language model within a larger one counts more than what is around it.
bool take_text_config(nlohmann::json& config) {
  const auto found = config.find("text_config");
  if (found == config.end() || !found->is_object()) return false;
  const nlohmann::json text = *found;
  config.erase("text_config");
  const bool tied = config.contains("tie_word_embeddings") && config["tie_word_embeddings"] == true;
  config.update(text);
  if (tied) config["tie_word_embeddings"] = true;  // the larger one ties them, whatever the other says
  return true;
}

// What `find` finds under a name, or under what language models within larger ones have before it.
template <class Find>
auto find_within(bool nested, std::string_view name, const Find& find) -> decltype(find(name)) {
  auto found = find(name);
  if (found != nullptr || !nested) return found;
  found = find("language_model." + std::string(name));
  constexpr std::string_view kModel = "model.";
  if (found != nullptr || !name.starts_with(kModel)) return found;
  return find("model.language_model." + std::string(name.substr(kModel.size())));
}

// Everything but the weights.
HfDirectory read_directory(const std::string& path) {
  HfDirectory hf;
  hf.path = path;
  const std::string config = in_dir(path, "config.json");
  if (!exists(config)) {
    throw_error(ErrorCode::kBadInput,
                "{}: config.json: found no such file, expected a Hugging Face model directory or a GGUF file",
                path);
  }
  hf.config = read_json_object(config);
  add_quantization(hf);
  hf.nested = take_text_config(hf.config);
  hf.generation_config = optional_json(in_dir(path, "generation_config.json"));
  hf.image_processor = optional_json(in_dir(path, "preprocessor_config.json"));
  if (hf.image_processor.is_null()) {
    const nlohmann::json processor = optional_json(in_dir(path, "processor_config.json"));
    if (processor.is_object() && processor.contains("image_processor"))
      hf.image_processor = processor["image_processor"];
  }
  hf.tokenizer_json = optional_text(in_dir(path, "tokenizer.json"));
  if (hf.tokenizer_json.empty()) hf.tekken_json = optional_text(in_dir(path, "tekken.json"));
  if (hf.tokenizer_json.empty()) hf.rwkv_vocab = optional_text(in_dir(path, "rwkv_vocab_v20230424.txt"));
  const std::string tokenizer_config = in_dir(path, "tokenizer_config.json");
  hf.tokenizer_config = optional_json(tokenizer_config);
  hf.chat_template = optional_text(in_dir(path, "chat_template.jinja"));
  if (hf.chat_template.empty()) hf.chat_template = template_of(hf.tokenizer_config, tokenizer_config);
  return hf;
}

// A .safetensors file stands for its directory: the whole of it when the file is one of its shards.
HfDirectory open_beside(const std::string& file) {
  const fs::path parent = fs::path(file).parent_path();
  const std::string directory = parent.empty() ? "." : parent.string();
  HfDirectory hf = read_directory(directory);
  const bool shard = exists(in_dir(directory, "model.safetensors.index.json"));
  hf.weights = shard ? Safetensors::open_dir(directory) : Safetensors::open_file(file);
  return hf;
}

}  // namespace

Checkpoint Checkpoint::open(const std::string& path) {
  Checkpoint checkpoint;
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) {
    checkpoint.hf = std::make_shared<HfDirectory>(read_directory(path));
    checkpoint.hf->weights = Safetensors::open_dir(path);
    return checkpoint;
  }
  const MappedFile file(path);
  const std::string_view start(reinterpret_cast<const char*>(file.bytes().data()),
                               std::min<size_t>(file.bytes().size(), 16));
  if (start.starts_with("GGUF")) {
    checkpoint.gguf = Gguf::open(path);
  } else if (path.ends_with(".safetensors")) {
    checkpoint.hf = std::make_shared<HfDirectory>(open_beside(path));
  } else {
    throw_error(
        ErrorCode::kBadInput,
        "{}: magic: found {}, expected a file that begins with 'GGUF', a .safetensors file or a Hugging Face "
        "directory",
        path, start.empty() ? std::string("an empty file") : printable(start));
  }
  return checkpoint;
}

const std::string& Checkpoint::path() const { return gguf ? gguf->path() : hf->path; }

const std::vector<TensorView>& Checkpoint::tensors() const {
  return gguf ? gguf->tensors() : hf->weights.tensors();
}

const TensorView* Checkpoint::find_tensor(std::string_view name) const {
  if (gguf) return gguf->find_tensor(name);
  return find_within(hf->nested, name, [&](std::string_view n) { return hf->weights.find_tensor(n); });
}

const StoredTensor* HfDirectory::find_stored(std::string_view name) const {
  return find_within(nested, name, [&](std::string_view n) { return weights.find_stored(n); });
}

size_t Checkpoint::mapped_bytes() const { return gguf ? gguf->mapped_bytes() : hf->weights.mapped_bytes(); }

}  // namespace millrace::io
