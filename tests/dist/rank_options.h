// The options and the runtime of one rank of a tiny model, as tests of ranks want them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "dist/communicator.h"
#include "engine/runtime.h"

namespace millrace::test {

inline constexpr int32_t kRows = 512;

inline EngineOptions options_for(const std::string& path, int ranks, const std::string& speeds = "",
                                 const std::string& kv_type = "", const std::string& device = "cpu") {
  return {.model = path,
          .device = device,
          .threads = 1,
          .context = 512,
          .kv_type = kv_type,
          .tensor_parallel = ranks,
          .rank_speeds = speeds,
          .step_tokens = kRows};
}

inline std::unique_ptr<Runtime> open(const EngineOptions& options,
                                     std::shared_ptr<dist::Communicator> group = nullptr) {
  return Runtime::open(options, {.sequences = 4, .logit_rows = kRows, .group = std::move(group)});
}

}  // namespace millrace::test
