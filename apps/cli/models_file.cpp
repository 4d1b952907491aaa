#include "models_file.h"

#include <fmt/core.h>

#include <toml++/toml.h>
#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "command.h"
#include "hub/model_name.h"
#include "model_names.h"
#include "model_options.h"

namespace millrace::cli {
namespace {

namespace fs = std::filesystem;

// m-00001-of-00003.gguf is a model of three files, called m.
constexpr std::string_view kFirstPart = "-00001-of-";

std::string name_of(const fs::path& path) {
  const std::string stem =
      path.has_filename() ? path.stem().string() : path.parent_path().filename().string();
  if (fs::is_directory(path)) return path.has_filename() ? path.filename().string() : stem;
  return stem.substr(0, stem.find(kFirstPart));
}

bool is_later_part(const std::string& stem) {
  const size_t of = stem.rfind("-of-");
  if (of == std::string::npos || of < 6 || stem.find(kFirstPart) != std::string::npos) return false;
  const std::string_view number = std::string_view(stem).substr(of - 5, 5);
  return stem[of - 6] == '-' &&
         std::all_of(number.begin(), number.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool is_model(const fs::directory_entry& entry) {
  const fs::path& path = entry.path();
  if (path.filename().string().starts_with(".")) return false;
  if (!entry.is_directory()) return path.extension() == ".gguf" && !is_later_part(path.stem().string());
  if (!fs::exists(path / "config.json")) return false;
  return std::any_of(
      fs::directory_iterator(path), fs::directory_iterator(),
      [](const fs::directory_entry& file) { return file.path().extension() == ".safetensors"; });
}

// Blocks of several models in one folder would push each other out.
EngineOptions with_place_for_blocks(EngineOptions options, const std::string& name) {
  if (!options.kv_dir.empty()) options.kv_dir = (fs::path(options.kv_dir) / name).string();
  return options;
}

ModelList models_of_folder(const fs::path& folder, const EngineOptions& defaults) {
  std::vector<fs::path> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (is_model(entry)) found.push_back(entry.path());
  }
  std::sort(found.begin(), found.end());
  ModelList list;
  for (const fs::path& path : found) {
    server::ModelSpec spec{.name = name_of(path), .engine = with_place_for_blocks(defaults, name_of(path))};
    spec.engine.model = path.string();
    spec.engine = checked(spec.engine);
    list.models.push_back(std::move(spec));
  }
  if (list.models.empty()) {
    throw_error(ErrorCode::kBadInput,
                "--models: {}: found no model, expected .gguf files, or folders with config.json and "
                "*.safetensors",
                folder.string());
  }
  return list;
}

// A value as the command line would have it.
std::string as_word(const toml::node& value) {
  if (const auto* text = value.as_string()) return text->get();
  if (const auto* truth = value.as_boolean()) return truth->get() ? "true" : "false";
  if (const auto* whole = value.as_integer()) return fmt::format("{}", whole->get());
  if (const auto* real = value.as_floating_point()) return fmt::format("{}", real->get());
  throw Error(ErrorCode::kBadInput, "expected a string, a number, true or false");
}

class TableReader {
 public:
  TableReader(const toml::table& table, const fs::path& file) : table_(table), file_(file) {}

  server::ModelSpec model(const EngineOptions& defaults, bool& preload) {
    const std::string given = text("path");
    if (given.empty()) fail("path", "is missing, expected a file or a folder");
    const bool of_hub = hub::parse_name(given).has_value();  // hf:owner/name:Q4_K_M
    const std::string path =
        of_hub ? find_model(given, defaults)
               : (fs::path(given).is_absolute() ? fs::path(given) : file_.parent_path() / given).string();
    name_ = text("name");
    if (name_.empty()) name_ = of_hub ? model_title(given) : name_of(path);
    server::ModelSpec spec{.name = name_, .engine = defaults};
    spec.aliases = texts("aliases");
    spec.keep = truth("keep");
    preload = truth("preload");
    if (const toml::node* seconds = table_.get("unload-after")) {
      const auto value = seconds->value<double>();
      if (!value || *value < 0) fail("unload-after", "expected seconds, 0 or more");
      spec.unload_after_s = *value;
    }
    read_engine_options(spec.engine);
    if (!table_.contains("kv-dir")) spec.engine = with_place_for_blocks(spec.engine, name_);
    spec.engine.model = path;
    spec.engine = checked(spec.engine);
    return spec;
  }

 private:
  [[noreturn]] void fail(std::string_view key, std::string_view problem) const {
    throw_error(ErrorCode::kBadInput, "{}: model '{}': {}: {}", file_.string(), name_, key, problem);
  }
  std::string text(std::string_view key) const {
    const toml::node* value = table_.get(key);
    if (value == nullptr) return {};
    if (!value->is_string()) fail(key, "expected a string");
    return value->as_string()->get();
  }
  bool truth(std::string_view key) const {
    const toml::node* value = table_.get(key);
    if (value == nullptr) return false;
    if (!value->is_boolean()) fail(key, "expected true or false");
    return value->as_boolean()->get();
  }
  std::vector<std::string> texts(std::string_view key) const {
    const toml::node* value = table_.get(key);
    if (value == nullptr) return {};
    std::vector<std::string> all;
    if (!value->is_array()) fail(key, "expected an array of strings");
    for (const toml::node& item : *value->as_array()) {
      if (!item.is_string()) fail(key, "expected an array of strings");
      all.push_back(item.as_string()->get());
    }
    return all;
  }

  // Everything else is an option of the engine, under the name, with the range and the complaints that it has
  // on the command line: it is parsed as one.
  void read_engine_options(EngineOptions& options) const {
    constexpr std::string_view kOwn[] = {"path", "name", "aliases", "keep", "preload", "unload-after"};
    std::vector<std::string> words = {"model"};
    for (const auto& [key, value] : table_) {
      const std::string_view name = key.str();
      if (std::find(std::begin(kOwn), std::end(kOwn), name) != std::end(kOwn)) continue;
      if (const toml::array* const list = value.as_array()) {
        for (const toml::node& item : *list)
          words.push_back(fmt::format("--{}={}", name, word_of(name, item)));
      } else {
        words.push_back(fmt::format("--{}={}", name, word_of(name, value)));
      }
    }
    CommandLine line("", "", "");
    Command command = line.add("model", "");
    add_device_options(command, options);
    add_quantize_option(command, options);
    add_adapter_option(command, options, /*many=*/true);
    add_image_option(command, options);
    add_engine_options(command, options, "Engine");
    try {
      line.parse_alone(words);
    } catch (const UsageError& error) {
      throw_error(ErrorCode::kBadInput, "{}: model '{}': {}", file_.string(), name_, error.what());
    }
  }
  std::string word_of(std::string_view key, const toml::node& value) const {
    try {
      return as_word(value);
    } catch (const Error& error) {
      fail(key, error.what());
    }
  }

  const toml::table& table_;
  const fs::path& file_;
  std::string name_;
};

ModelList models_of_file(const fs::path& file, const EngineOptions& defaults) {
  toml::table document;
  try {
    document = toml::parse_file(file.string());
  } catch (const toml::parse_error& error) {
    throw_error(ErrorCode::kBadInput, "{}: line {}: {}", file.string(), error.source().begin.line,
                error.description());
  }
  const toml::array* models = document["model"].as_array();
  if (models == nullptr || document.size() != 1 || !models->is_array_of_tables()) {
    throw_error(ErrorCode::kBadInput, "{}: expected a table [[model]] for each model, and nothing else",
                file.string());
  }
  ModelList list;
  for (const toml::node& node : *models) {
    bool preload = false;
    list.models.push_back(TableReader(*node.as_table(), file).model(defaults, preload));
    if (preload) list.preload.push_back(list.models.back().name);
  }
  return list;
}

}  // namespace

ModelList read_models(const std::string& path, const EngineOptions& defaults) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return models_of_folder(path, defaults);
  if (!fs::exists(path, ignored)) {
    throw_error(ErrorCode::kBadInput, "--models: {}: is not there, expected a folder or a TOML file", path);
  }
  return models_of_file(path, defaults);
}

}  // namespace millrace::cli
