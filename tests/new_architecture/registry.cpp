// src/model/registry.cpp with one line more in its list. The linker takes a symbol from a program's own
// objects before it looks into libraries, so this list takes the place of that one.
#include "model/architecture_list.h"

#define MILLRACE_ARCHITECTURES_AND_MACARON(ONE) \
  MILLRACE_ARCHITECTURES(ONE)                   \
  ONE(kMacaron)

#define MILLRACE_LISTED MILLRACE_ARCHITECTURES_AND_MACARON
#include "model/registry.cpp"  // NOLINT(bugprone-suspicious-include)
