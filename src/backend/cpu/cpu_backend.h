// The cpu backend: SIMD kernels through a table chosen once, weights where they lie in the mapped file, a
// pool of threads that all executors share.
#pragma once

#include <memory>
#include <string_view>

#include "backend/backend.h"

namespace millrace {

// With the instruction set MILLRACE_ISA names, or the best this machine has.
std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options);

// With a named one (features.h); "" is the best.
std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options, std::string_view isa);

}  // namespace millrace
