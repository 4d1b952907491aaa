// The control tokens of harmony, by name.
#pragma once

#include <cstdint>

#include "chat/chat_codec.h"

namespace millrace::chat {

struct HarmonyTokens {
  int32_t start = -1, end = -1, message = -1, channel = -1;
  int32_t constrain = -1, ret = -1, call = -1;  // -1 where a vocabulary lacks them

  // Whether this vocabulary speaks harmony at all.
  bool complete() const { return start >= 0 && end >= 0 && message >= 0 && channel >= 0; }
};

HarmonyTokens find_harmony_tokens(const Codec& codec);

}  // namespace millrace::chat
