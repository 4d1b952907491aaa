// Which files of a repository a name means. The same rule is used for what the hub lists and for what lies in
// the cache.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "hub/repo_file.h"

namespace millrace::hub {

// Files that belong together: the parts of one GGUF file, or a directory's weights with what is read beside
// them.
struct FileGroup {
  std::string label;            // Q4_K_M, safetensors; a file's name where it has no label
  std::vector<RepoFile> files;  // GGUF: part 1 first
  bool gguf = false;
};
// Complete ones only: every part of a split file, a directory with config.json.
std::vector<FileGroup> group_files(const std::vector<RepoFile>& files);

struct FileChoice {
  FileGroup group;
  std::string why;                  // for people, where there were several
  std::vector<std::string> others;  // labels
  std::string problem;              // why nothing was chosen; the rest is empty then
};
// `wanted`: a file, a quantization, the beginning of one (Q4), "gguf", "safetensors", or empty.
FileChoice choose_files(const std::vector<RepoFile>& files, std::string_view wanted);

}  // namespace millrace::hub
