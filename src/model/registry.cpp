// architectures(): a file of its own, so that a test can link a longer list in its place
// (tests/new_architecture/registry.cpp).
#include "model/architecture.h"
#include "model/architecture_list.h"

#ifndef MILLRACE_LISTED
#define MILLRACE_LISTED MILLRACE_ARCHITECTURES
#endif

namespace millrace {

#define MILLRACE_DECLARE(object) extern const Architecture& object;
MILLRACE_LISTED(MILLRACE_DECLARE)
#undef MILLRACE_DECLARE

std::span<const Architecture* const> architectures() {
#define MILLRACE_ADDRESS(object) &object,
  static const Architecture* const kAll[] = {MILLRACE_LISTED(MILLRACE_ADDRESS)};
#undef MILLRACE_ADDRESS
  return kAll;
}

}  // namespace millrace
