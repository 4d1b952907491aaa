// What tests of whole models read: the logits of every token of a prompt.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/runtime.h"

namespace millrace {

// [tokens, vocab], fed in pieces of `chunk`; the runtime has that many logit rows.
inline std::vector<float> all_logits(Runtime& runtime, std::span<const int32_t> tokens, size_t chunk) {
  kv::Sequence sequence = runtime.make_sequence();
  std::vector<float> out;
  while (!tokens.empty()) {
    const size_t count = std::min(chunk, tokens.size());
    const StepInput input = {
        .sequence = &sequence, .tokens = tokens.first(count), .want = StepInput::Want::kAll};
    const std::span<const float> logits = runtime.step({&input, 1});
    out.insert(out.end(), logits.begin(), logits.end());
    tokens = tokens.subspan(count);
  }
  return out;
}

}  // namespace millrace
