// What the code that opens a Runtime decides, beside the options that a user sets (millrace/options.h): how
// many sequences it runs itself, what it wants to see of a step, and what it puts between the parts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/topology.h"
#include "dist/communicator.h"
#include "kv/cache.h"
#include "model/model.h"

namespace millrace {

// The types that weights get while they are loaded (weight_types.h).
struct WeightTypes {
  TypeChoice choice;  // empty: as they are stored
  InputsOf inputs;
  std::string identity;  // what was done, in a word: other weights, so other names for cached blocks
  std::string note;      // what `auto` chose and what that is expected to cost, in words
};

struct RuntimeSetup {
  static constexpr int32_t kShared = 0;
  // Sequences with a context each, and nothing remembered beyond their life. kShared: the engine's way,
  // EngineOptions::max_running sequences over one pool, remembered as the options say.
  int32_t sequences = 1;
  int32_t logit_rows = 0;    // most asked for in a step; 0: one for each sequence and each draft
  int32_t most_context = 0;  // of a context that the options do not name; 0: any
  int64_t most_tokens = 0;   // of a shared pool whose size the options do not name; 0: any

  std::vector<int32_t> kv_blocks = {};  // of a shared pool, per layer group, instead of what the options say
  int32_t adapter = -1;                 // of the runtime's own steps; -1: none (Slice has its own)
  int32_t adapter_rank = 0;             // the runtime's to fill in, as are
  OpFeatures adapter_features = {};     // what adapters ask of a device
  WeightTypes weights = {};             // instead of what EngineOptions::quantize says
  // Stands between the model and the device's executor: to watch or to time what is called.
  std::function<std::unique_ptr<Executor>(std::unique_ptr<Executor>)> wrap_executor = {};
  // The cache's files, log and wake-up call; groups and identity are the runtime's to fill in.
  std::function<void(kv::CacheOptions&)> adjust_cache = {};

  // The ranks that share the model, instead of the processes of mpirun's job: EngineOptions::tensor_parallel
  // of them, of which this is rank 0. The others follow_rank_zero (rank_group.h).
  std::shared_ptr<dist::Communicator> group = {};
  int local_ranks = 1;  // of one machine, which share its memory; the runtime's to fill in

  Topology topology = {};  // the memory nodes that a CPU's threads run on; empty: all of them
  // Called, from another thread, when ranks that the runtime started are lost or there again.
  std::function<void()> wake = [] {};

  bool shared() const { return sequences == kShared; }
};

}  // namespace millrace
