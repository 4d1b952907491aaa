// Which device a model goes to: the one that is named, or with "auto" a GPU if it is there and large enough.
#pragma once

#include <memory>
#include <string>

#include "backend/backend.h"
#include "engine/runtime_setup.h"
#include "io/checkpoint.h"
#include "millrace/options.h"
#include "model/model.h"

namespace millrace {

// BackendOptions' own: the ranks that share the model; absent: this process has it alone.
struct RankShare {
  dist::Communicator* group = nullptr;
  const dist::Shares* shares = nullptr;
  int local_rank = 0, local_ranks = 1;
};

struct ChosenBackend {
  std::unique_ptr<Backend> backend;
  std::string note;  // ModelInfo::device_note
};
ChosenBackend open_backend(const io::Checkpoint& checkpoint, const ModelConfig& config,
                           const EngineOptions& options, const RuntimeSetup& setup = {},
                           const RankShare& ranks = {});

}  // namespace millrace
