// safetensors: one mapped file, or a directory's shards through model.safetensors.index.json.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/tensor_view.h"

namespace millrace::io {

class Safetensors {
 public:
  static Safetensors open_file(const std::string& path);
  // model.safetensors, or every shard that model.safetensors.index.json names (each must be there and hold the
  // tensors the index promises).
  static Safetensors open_dir(const std::string& directory);
  static Safetensors parse(std::span<const std::byte> bytes, const std::string& name);

  const std::vector<TensorView>& tensors() const;
  const TensorView* find_tensor(std::string_view name) const;
  size_t mapped_bytes() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace millrace::io
