// Every architecture, by the name of the object that its file defines. A new one is a line here; the order is
// that of lists for people.
#pragma once

#define MILLRACE_ARCHITECTURES(ONE) \
  ONE(kLlama)                       \
  ONE(kQwen2)                       \
  ONE(kQwen3)                       \
  ONE(kQwen3Moe)                    \
  ONE(kQwen3Vl)                     \
  ONE(kQwen3VlMoe)                  \
  ONE(kGptOss)                      \
  ONE(kGemma3)                      \
  ONE(kGemma4)                      \
  ONE(kGemma2)                      \
  ONE(kPhi3)                        \
  ONE(kGranite)                     \
  ONE(kOlmo2)                       \
  ONE(kSmolLm3)                     \
  ONE(kSeedOss)                     \
  ONE(kErnie45)                     \
  ONE(kGpt2)                        \
  ONE(kPhi)                         \
  ONE(kBert)                        \
  ONE(kModernBert)                  \
  ONE(kQwen2Moe)                    \
  ONE(kGlm4Moe)                     \
  ONE(kLlama4)                      \
  ONE(kDeepSeek2)                   \
  ONE(kDeepSeek32)                  \
  ONE(kMistral4)                    \
  ONE(kMistral3)                    \
  ONE(kQwen3Next)                   \
  ONE(kQwen35)                      \
  ONE(kQwen35Moe)                   \
  ONE(kLfm2)                        \
  ONE(kLfm2Moe)                     \
  ONE(kGraniteHybrid)               \
  ONE(kMamba2)                      \
  ONE(kNemotronH)                   \
  ONE(kNemotronHMoe)                \
  ONE(kFalconH1)                    \
  ONE(kKimiLinear)                  \
  ONE(kRwkv7)
