// GgufKeys: the hyperparameters of a Hugging Face config.json as GGUF keys, under "<architecture>.".
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/gguf_writer.h"
#include "model/config.h"
#include "model/config_reader.h"

namespace millrace {

// What Architecture::write_keys writes with.
class GgufKeys {
 public:
  // All must outlive it. `config` is what the architecture read with `reader`.
  GgufKeys(const ConfigReader& reader, const ModelConfig& config, io::GgufWriter& writer)
      : reader_(reader), config_(config), writer_(writer) {}

  const ConfigReader& reader() const { return reader_; }
  const ModelConfig& config() const { return config_; }

  // Keys without "<architecture>.".
  void size(std::string_view key, int64_t value) { writer_.set_u32(full(key), static_cast<uint32_t>(value)); }
  void sizes(std::string_view key, const std::vector<int32_t>& values) {
    writer_.set_i32s(full(key), values);
  }
  void real(std::string_view key, double value) { writer_.set_f32(full(key), static_cast<float>(value)); }
  void flag(std::string_view key, bool value) { writer_.set_bool(full(key), value); }
  void flags(std::string_view key, const std::vector<bool>& values) { writer_.set_bools(full(key), values); }
  void text(std::string_view key, std::string_view value) { writer_.set_string(full(key), value); }
  // A whole number of config.json, from 1 to `high`; Error{kBadInput} where it is not there.
  void copy(std::string_view key, std::string_view field, int64_t high) {
    size(key, reader_.integer("", field, 1, high));
  }

 private:
  std::string full(std::string_view key) const { return config_.architecture + "." + std::string(key); }

  const ConfigReader& reader_;
  const ModelConfig& config_;
  io::GgufWriter& writer_;
};

// Everything under "<architecture>." for a Hugging Face checkpoint, of which config.json is enough.
void write_config_keys(const io::Checkpoint& checkpoint, const ModelConfig& config, io::GgufWriter& writer);

}  // namespace millrace
