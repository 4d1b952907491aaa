#include "model_file.h"

#include <fmt/core.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "base/error.h"
#include "engine/load_tokenizer.h"
#include "io/checkpoint.h"
#include "model/model.h"

namespace millrace::server {
namespace {

namespace fs = std::filesystem;

size_t size_of(const fs::path& file) {
  std::error_code error;
  const auto bytes = fs::file_size(file, error);
  return error ? 0 : static_cast<size_t>(bytes);
}

// A file, all parts of one, or the weights of a directory.
size_t bytes_on_disk(const fs::path& path) {
  std::error_code ignored;
  const std::string stem = path.stem().string();
  const size_t part = stem.find("-00001-of-");
  const bool parts = part != std::string::npos, folder = fs::is_directory(path, ignored);
  if (!folder && !parts) return size_of(path);
  size_t bytes = 0;
  for (const auto& entry :
       fs::directory_iterator(folder ? path : fs::absolute(path).parent_path(), ignored)) {
    const std::string name = entry.path().filename().string();
    const bool counts = folder ? name.ends_with(".safetensors")
                               : name.starts_with(stem.substr(0, part)) && name.ends_with(".gguf");
    if (counts) bytes += size_of(entry.path());
  }
  return bytes;
}

std::string digest_of(std::string_view text) {
  std::string digits;
  for (uint64_t word = 0; word < 4; ++word) {
    uint64_t hash = 0xcbf29ce484222325u + word;  // FNV-1a
    for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    digits += fmt::format("{:016x}", hash);
  }
  return digits;
}

void read_tensors(const io::Checkpoint& checkpoint, ModelFile& file) {
  std::map<std::string_view, size_t> bytes_by_type;
  for (const TensorView& tensor : checkpoint.tensors()) {
    file.parameters += tensor.elements();
    bytes_by_type[info(tensor.type).name] += tensor.bytes();
  }
  size_t most = 0;
  for (const auto& [type, bytes] : bytes_by_type) {
    if (bytes <= most) continue;
    most = bytes;
    file.quantization = std::string(type);
  }
}

// As Hugging Face's models for sequence classification and GGUF's for ranking name them.
bool has_classifier(const io::Checkpoint& checkpoint) {
  constexpr const char* kHeads[] = {"classifier.weight", "classifier.out_proj.weight", "score.weight",
                                    "cls.weight", "cls.output.weight"};
  return std::any_of(std::begin(kHeads), std::end(kHeads),
                     [&](const char* name) { return checkpoint.find_tensor(name) != nullptr; });
}

}  // namespace

ModelFile read_model_file(const std::string& path) {
  ModelFile file;
  file.bytes = bytes_on_disk(path);
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) file.modified = status.st_mtime;
  file.digest = digest_of(fmt::format("{}\n{}\n{}", path, file.bytes, file.modified));
  try {
    const io::Checkpoint checkpoint = io::Checkpoint::open(path);
    file.format = checkpoint.gguf ? "gguf" : "safetensors";
    const ModelConfig config = read_config(checkpoint);
    file.architecture = config.architecture;
    file.trained_context = config.context_length;
    file.embedding_size = config.hidden;
    read_tensors(checkpoint, file);
    file.chat_template = chat_template_text(checkpoint);
    file.classifies = has_classifier(checkpoint);
  } catch (const std::exception& error) {
    file.error = error.what();
  }
  return file;
}

}  // namespace millrace::server
