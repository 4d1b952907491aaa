// How much memory this process may still take.
#pragma once

#include <cstddef>

namespace millrace {

// What the kernel would give us without swapping, cut by the cgroup's limit.
size_t available_memory();

}  // namespace millrace
