// GGUF v2 and v3: metadata and tensor directory, parsed with every count and offset checked against the file,
// tensors left where they lie in the mapping. Split files (-00001-of-0000N.gguf) open from their first part.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/mapped_file.h"
#include "tensor/tensor_view.h"

namespace millrace::io {

struct GgufArray;
// Integers of every width become int64/uint64, both floats double. Strings point into the mapping.
using GgufValue = std::variant<uint64_t, int64_t, double, bool, std::string_view, GgufArray>;
struct GgufArray {
  // Exactly one is filled, by element type.
  std::vector<int64_t> integers;
  std::vector<double> reals;
  std::vector<std::string_view> strings;
};

// A metadata value as it lies in the file, its type first; for writers that copy it.
struct GgufRawValue {
  std::string_view key;
  std::span<const std::byte> bytes;
};

class Gguf {
 public:
  // Opens `path` and, when it is part 1 of a split file, its siblings. Throws Error naming file, field, what
  // was found and what was expected.
  static Gguf open(const std::string& path);
  // Parses bytes that something else keeps alive (tests, fuzzing); `name` stands for the path in messages.
  static Gguf parse(std::span<const std::byte> bytes, const std::string& name);

  const std::string& path() const;
  const std::map<std::string, GgufValue, std::less<>>& metadata() const;
  const std::vector<GgufRawValue>& raw_metadata() const;  // the first part's, in file order
  bool has(std::string_view key) const;
  // Typed access. The get_* forms with a fallback return it when the key is absent; those without throw,
  // naming the missing key. A key of the wrong type throws either way. Integers that do not fit int64 throw.
  int64_t get_int(std::string_view key) const;
  int64_t get_int(std::string_view key, int64_t fallback) const;
  double get_real(std::string_view key) const;  // also from an integer
  double get_real(std::string_view key, double fallback) const;
  bool get_bool(std::string_view key, bool fallback) const;
  std::string_view get_string(std::string_view key) const;
  std::string_view get_string(std::string_view key, std::string_view fallback) const;
  const GgufArray* get_array(std::string_view key) const;  // nullptr when absent

  const std::vector<TensorView>& tensors() const;  // in file order, all parts
  const TensorView* find_tensor(std::string_view name) const;
  size_t mapped_bytes() const;

 private:
  struct State;
  static void open_part(State& state, const std::string& given, const std::string& path, int64_t no,
                        int64_t count);
  static void check_tensor_count(const State& state);

  std::shared_ptr<State> state_;  // the mappings live as long as any copy
};

}  // namespace millrace::io
