// safetensors: one mapped file, or a directory's shards through model.safetensors.index.json.
// Tensors of F32, F16, BF16, F8_E4M3, U8 and I32 are listed. One of another type (I64, BOOL, ...) is checked
// like the rest but not listed: find_tensor throws Error{kUnsupported} when it is asked for by name, so that
// a checkpoint with a stray buffer in it still loads. find_stored() gives a tensor of any type as it lies,
// for those who know what its numbers mean (packed weights).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/tensor_view.h"

namespace millrace::io {

// A tensor as the file describes it, row-major, without gaps, at an address its numbers can be read from.
struct StoredTensor {
  std::string dtype;  // safetensors' name: "I32", "I64", "F8_E8M0"
  int rank = 0;
  std::array<int64_t, 4> shape{1, 1, 1, 1};  // shape[0..rank)
  const std::byte* data = nullptr;
};

class Safetensors {
 public:
  // Throws Error naming file, field, what was found and what was expected.
  static Safetensors open_file(const std::string& path);
  // model.safetensors, or every shard that model.safetensors.index.json names (each must be there and hold
  // the tensors the index promises).
  static Safetensors open_dir(const std::string& directory);
  // Parses bytes that something else keeps alive (tests, fuzzing); `name` stands for the path in messages.
  static Safetensors parse(std::span<const std::byte> bytes, const std::string& name);

  // Per file in order of their bytes. A tensor lies in the mapping, unless the file puts it at an address its
  // numbers cannot be read from (no multiple of 2 or 4): such a one is a copy.
  const std::vector<TensorView>& tensors() const;
  const TensorView* find_tensor(std::string_view name) const;    // nullptr when there is none
  const StoredTensor* find_stored(std::string_view name) const;  // the same, of whatever type
  size_t mapped_bytes() const;
  size_t copied_bytes() const;  // of tensors that had to be copied to be aligned

 private:
  struct State;
  std::shared_ptr<State> state_;  // mappings and copies live as long as any copy of this
};

}  // namespace millrace::io
