#include "hub/file_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "hub/quant_label.h"

namespace millrace::hub {
namespace {

constexpr const char* kSafetensors = "safetensors";
// Beside the weights: what Millrace reads, and what other programs that share the cache look for first.
constexpr std::array<std::string_view, 11> kSideFiles = {
    "config.json",           "generation_config.json",  "preprocessor_config.json",
    "processor_config.json", "tokenizer.json",          "chat_template.jinja",
    "tokenizer_config.json", "special_tokens_map.json", "model.safetensors.index.json",
    "tekken.json",           "rwkv_vocab_v20230424.txt"};

// Projectors of images and measurements for quantizers are GGUF files and no models.
bool is_model_gguf(std::string_view path) {
  const std::string key = label_key(path);
  return path.ends_with(".gguf") && key.find("MMPROJ") == std::string::npos &&
         key.find("IMATRIX") == std::string::npos;
}

void add_gguf_groups(const std::vector<RepoFile>& files, std::vector<FileGroup>& groups) {
  std::map<std::pair<std::string, int>, std::map<int, RepoFile>> families;  // by prefix and number of parts
  for (const RepoFile& file : files) {
    if (!is_model_gguf(file.path)) continue;
    const PartName part = part_name(file.path);
    families[{part.prefix, part.parts}].emplace(part.part, file);
  }
  for (auto& [family, parts] : families) {
    if (static_cast<int>(parts.size()) != family.second) continue;
    FileGroup group{.label = quant_label(parts.begin()->second.path), .files = {}, .gguf = true};
    if (group.label.empty()) group.label = family.first.substr(family.first.rfind('/') + 1);
    for (auto& [number, file] : parts) group.files.push_back(std::move(file));
    groups.push_back(std::move(group));
  }
}

void add_safetensors_group(const std::vector<RepoFile>& files, std::vector<FileGroup>& groups) {
  FileGroup group{.label = kSafetensors, .files = {}, .gguf = false};
  bool config = false, index = false;
  std::vector<RepoFile> shards;
  const RepoFile* whole = nullptr;
  for (const RepoFile& file : files) {
    if (std::find(kSideFiles.begin(), kSideFiles.end(), file.path) != kSideFiles.end()) {
      config = config || file.path == "config.json";
      index = index || file.path == "model.safetensors.index.json";
      group.files.push_back(file);
    } else if (file.path == "model.safetensors") {
      whole = &file;
    } else if (file.path.starts_with("model-") && file.path.ends_with(".safetensors") &&
               file.path.find('/') == std::string::npos) {
      shards.push_back(file);
    }
  }
  if (!config || (whole == nullptr && (!index || shards.empty()))) return;
  if (index && !shards.empty()) {
    const PartName last = part_name(shards.back().path.substr(0, shards.back().path.size() - 12));
    if (last.parts > 1 && static_cast<int>(shards.size()) != last.parts) return;  // some are not here yet
    group.files.insert(group.files.end(), shards.begin(), shards.end());
  } else {
    group.files.push_back(*whole);
  }
  groups.push_back(std::move(group));
}

// By the quantization alone: a label may be a file's name.
int rank_of(const FileGroup& group) { return label_rank(group.gguf ? quant_label(group.files[0].path) : ""); }

bool better(const FileGroup& a, const FileGroup& b) {
  const int rank_a = rank_of(a), rank_b = rank_of(b);
  if (rank_a != rank_b) return rank_a < rank_b;
  const std::string &path_a = a.files[0].path, &path_b = b.files[0].path;
  return path_a.size() != path_b.size() ? path_a.size() < path_b.size() : path_a < path_b;
}

bool names_file(const FileGroup& group, std::string_view wanted) {
  return std::any_of(group.files.begin(), group.files.end(), [&](const RepoFile& file) {
    const std::string_view path = file.path, name = path.substr(path.rfind('/') + 1);
    const std::string with_end = std::string(wanted) + ".gguf";
    return path == wanted || name == wanted || path == with_end || name == with_end;
  });
}

// `piece` in `text` (both label_key) as whole words.
bool has_words(std::string_view text, std::string_view piece) {
  const auto word = [&](size_t at) { return at < text.size() && (std::isalnum(text[at]) != 0); };
  for (size_t at = text.find(piece); at != std::string_view::npos; at = text.find(piece, at + 1)) {
    if ((at == 0 || !word(at - 1)) && !word(at + piece.size())) return true;
  }
  return false;
}

// The ways to mean a group, the most exact first.
bool matches(const FileGroup& group, std::string_view wanted, int way) {
  const std::string key = label_key(wanted), label = label_key(group.label);
  const bool dynamic = label.starts_with("UD_");
  switch (way) {
    case 0:
      return names_file(group, wanted);
    case 1:
      return label == key;
    case 2:
      return dynamic && label.substr(3) == key;
    case 3:
      return label.starts_with(key + "_") || (dynamic && label.substr(3).starts_with(key + "_"));
    default:
      return group.gguf && has_words(label_key(group.files[0].path), key);
  }
}

std::string list_of(const std::vector<FileGroup>& groups) {
  std::set<std::string> labels;
  for (const FileGroup& group : groups) labels.insert(group.label);
  return fmt::format("{}", fmt::join(labels, ", "));
}

std::vector<FileGroup> wanted_groups(const std::vector<FileGroup>& groups, std::string_view wanted) {
  const std::string key = label_key(wanted);
  if (wanted.empty() || key == "GGUF") {
    std::vector<FileGroup> ggufs;
    std::copy_if(groups.begin(), groups.end(), std::back_inserter(ggufs),
                 [](const FileGroup& group) { return group.gguf; });
    return ggufs.empty() && wanted.empty() ? groups : ggufs;
  }
  for (int way = 0; way <= 4; ++way) {
    std::vector<FileGroup> found;
    std::copy_if(groups.begin(), groups.end(), std::back_inserter(found),
                 [&](const FileGroup& group) { return matches(group, wanted, way); });
    if (!found.empty()) return found;
  }
  return {};
}

std::string nothing_to_load(const std::vector<RepoFile>& files) {
  for (const RepoFile& file : files) {
    if (file.path.ends_with(".bin") || file.path.ends_with(".pt") || file.path.ends_with(".pth")) {
      return fmt::format("found weights as {}, expected GGUF or safetensors files", file.path);
    }
  }
  return fmt::format(
      "found no model among its {} files, expected a .gguf file, or config.json and "
      "model.safetensors",
      files.size());
}

}  // namespace

std::vector<FileGroup> group_files(const std::vector<RepoFile>& given) {
  std::vector<RepoFile> files = given;
  std::sort(files.begin(), files.end(), [](const RepoFile& a, const RepoFile& b) { return a.path < b.path; });
  std::vector<FileGroup> groups;
  add_gguf_groups(files, groups);
  add_safetensors_group(files, groups);
  return groups;
}

FileChoice choose_files(const std::vector<RepoFile>& files, std::string_view wanted) {
  const std::vector<FileGroup> groups = group_files(files);
  FileChoice choice;
  if (groups.empty()) {
    choice.problem = nothing_to_load(files);
    return choice;
  }
  const std::vector<FileGroup> candidates = wanted_groups(groups, wanted);
  if (candidates.empty()) {
    choice.problem = fmt::format("found nothing for '{}', expected one of {}", wanted, list_of(groups));
    return choice;
  }
  choice.group = *std::min_element(candidates.begin(), candidates.end(), better);
  if (wanted.empty() && rank_of(choice.group) >= kUnloadable) {
    choice.problem = fmt::format(
        "found {} only, expected one of Q4_K_M, Q8_0, MXFP4, BF16 and others; types that run on the cpu "
        "alone "
        "are taken where they are named: hf:owner/name:{}",
        list_of(candidates), choice.group.label);
    choice.group = {};
    return choice;
  }
  for (const FileGroup& group : groups) {
    if (group.label != choice.group.label) choice.others.push_back(group.label);
  }
  std::sort(choice.others.begin(), choice.others.end());
  choice.others.erase(std::unique(choice.others.begin(), choice.others.end()), choice.others.end());
  if (candidates.size() > 1) {
    choice.why = fmt::format("{} of {}", choice.group.label, list_of(candidates));
  }
  return choice;
}

}  // namespace millrace::hub
