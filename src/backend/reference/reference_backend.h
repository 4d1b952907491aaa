// The reference backend: naive, float32 with double sums, one thread, no cleverness. It is the oracle of
// every test, so it is written to be read.
#pragma once

#include <memory>

#include "backend/backend.h"

namespace millrace {

// fp8_prompts: BackendOptions'.
std::unique_ptr<Backend> make_reference_backend(bool fp8_prompts = false);

}  // namespace millrace
