// The memory a checkpoint will need, from the same functions that later allocate it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/runtime_setup.h"
#include "io/checkpoint.h"
#include "millrace/options.h"
#include "model/model.h"

namespace millrace {

// What running this checkpoint takes, known before anything is loaded.
struct MemoryPlan {
  size_t weights_mapped = 0;       // read from the file's mapping
  size_t weights_repacked = 0;     // copies the backend makes
  size_t weights_dequantized = 0;  // second copies that only prompts read
  size_t workspace = 0;
  size_t pool = 0;  // KV blocks
  struct Group {
    int32_t window, layers;
    size_t bytes_per_1k_tokens;  // of a sequence up to its window; of states, of those that are kept
    size_t bytes_at_context;     // one sequence of context_length
    bool state;                  // of layers with a state; the window is their block and the one before it
    int32_t states_apart;        // tokens between those that are kept
  };
  std::vector<Group> groups;
  int32_t context = 0;  // planned
  DType kv_type = DType::kF32;
  size_t memory_available = 0;   // what the machine has for us
  size_t total = 0;              // of that: mapped (where it is the machine's) + copies + workspace + pool
  int32_t longest_context = 0;   // that fits beside the weights for one sequence, at most the trained one
  int32_t users_at_context = 0;  // sequences of `context` that fit
  std::string does_not_fit;      // why running it would be refused, with what would fit; empty: it fits
};
MemoryPlan plan_memory(const io::Checkpoint& checkpoint, const ModelConfig& config, const Backend& backend,
                       const EngineOptions& options, const RuntimeSetup& setup = {});

}  // namespace millrace
