// Every architecture, by the name of the object that its file defines. A new one is a line here; the order is
// that of lists for people.
#pragma once

#define MILLRACE_ARCHITECTURES(ONE) \
  ONE(kLlama)                       \
  ONE(kQwen2)                       \
  ONE(kQwen3)                       \
  ONE(kQwen3Moe)                    \
  ONE(kGptOss)                      \
  ONE(kQwen2Moe)                    \
  ONE(kGlm4Moe)                     \
  ONE(kLlama4)
