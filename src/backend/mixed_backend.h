// A mixed device: one backend for what fits its memory, another for the rest of the model (mixed/placement.h
// says what is where). Made of any two.
#pragma once

#include <memory>

#include "backend/backend.h"
#include "backend/placement.h"

namespace millrace {

// What the first device holds beside its executor's workspace: rows that come from the second.
inline size_t mixed_rows_bytes(const ExecutorSpec& spec) {
  return static_cast<size_t>(spec.max_tokens) * static_cast<size_t>(spec.hidden) * sizeof(float);
}

// `memory`: the first device's, where that has none of its own to speak of.
std::unique_ptr<Backend> make_mixed_backend(std::unique_ptr<Backend> first, std::unique_ptr<Backend> second,
                                            mixed::Placement placement,
                                            std::optional<size_t> memory = std::nullopt);

}  // namespace millrace
