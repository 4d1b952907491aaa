// The adapters that a process has been told to take, read and checked: what a device has to have for them,
// and what names them where several processes need the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backend/op_features.h"
#include "io/checkpoint.h"
#include "millrace/options.h"
#include "model/adapter.h"

namespace millrace {

struct AdapterSet {
  std::vector<Adapter> adapters;  // EngineOptions::adapters, in this order
  std::vector<std::string> identities;
  OpFeatures features;
  int32_t max_rank = 0;
  size_t bytes = 0;

  std::string identity() const;  // of all of them, in a word; empty: there are none
};

// Throws Error for one that cannot be read, or not with these ranks.
AdapterSet read_adapters(const EngineOptions& options, const io::Checkpoint& checkpoint,
                         const ModelConfig& config);

}  // namespace millrace
