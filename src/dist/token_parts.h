// Likeliest tokens of a vocabulary that ranks have parts of.
#pragma once

#include <cstdint>
#include <span>

#include "dist/communicator.h"

namespace millrace::dist {

inline constexpr int32_t kNoTokens = -2;  // of a rank without a part of the vocabulary

// tokens[i] becomes that of the largest value of all ranks' (token, value), the lowest among equals; -1 if
// one has -1. On rank 0 alone.
void collect_largest(Communicator& group, std::span<int32_t> tokens, std::span<const float> values);

}  // namespace millrace::dist
