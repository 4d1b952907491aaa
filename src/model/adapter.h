// Adapters (LoRA) as files hold them: a PEFT directory (adapter_config.json, adapter_model.safetensors) or
// llama.cpp's GGUF adapter. Read for one model, whichever way that one is packed: names become roles, rows of
// fused matrices are parted, rotated rows are put into the model's order.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint.h"
#include "model/config.h"

namespace millrace {

// "name=path" or "name=path:scale", as options have it. Throws Error{kBadInput} naming `option`.
struct AdapterOption {
  std::string name, path;
  double scale = 1.0;
};
AdapterOption parse_adapter_option(std::string_view option, std::string_view text);
// Of all; names that occur twice are refused too.
std::vector<AdapterOption> parse_adapter_options(std::string_view option,
                                                 const std::vector<std::string>& texts);

// y += B (A x) of the matrix with this role in this layer; layer -1: of the output matrix. Of experts each
// has an A and a B of its own; those that the file leaves alone have zeros.
struct AdapterUpdate {
  int layer = 0;
  std::string role;  // "attn_q.weight"
  std::string name;  // what the file calls it
  int64_t rank = 0, in = 0, out = 0;
  int64_t experts = 0;   // 0: a plain matrix
  std::vector<float> a;  // [experts, rank, in]
  std::vector<float> b;  // [experts, out, rank], times the adapter's scale
};

struct Adapter {
  std::string name, path;
  std::vector<AdapterUpdate> updates;
  int64_t max_rank() const;
  bool adapts_experts() const;
  size_t bytes() const;
};

// Throws Error naming what the file has and this model, or this build, cannot take.
Adapter read_adapter(const AdapterOption& option, const io::Checkpoint& model, const ModelConfig& config);

}  // namespace millrace
