// Which positions of its sequence a token sees.
#pragma once

#include <algorithm>
#include <cstdint>

namespace millrace::cpu {

struct AttentionMask {
  int32_t window = 0;  // itself and the window - 1 before it; 0: everything
  int32_t chunk = 0;   // without a window: from the start of its chunk of so many positions; 0: from 0
  bool bidirectional = false;  // those behind it too: window - 1 of them or all

  int32_t first(int32_t position) const {
    if (window > 0) return std::max(0, position - window + 1);
    return chunk > 0 ? position / chunk * chunk : 0;
  }
  // length: of the sequence, with this step's tokens
  int32_t last(int32_t position, int32_t length) const {  // the first that is not seen
    if (!bidirectional) return position + 1;
    return window > 0 ? std::min(length, position + window) : length;
  }
};

}  // namespace millrace::cpu
