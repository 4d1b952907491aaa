// EngineOptions::lock.
#pragma once

namespace millrace {

// Everything this process has mapped, weights included, stays in memory. Throws Error{kNoMemory} with the
// limit.
void lock_memory();

}  // namespace millrace
