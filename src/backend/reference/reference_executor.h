// The reference executor and its weight, shared inside this folder only.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"
#include "kernels/quant/fp8_patches.h"

namespace millrace {

struct ReferenceWeight final : Weight {
  TensorView view;            // matrices: dequantized row by row as they are used
  std::vector<float> values;  // vectors: all of it
  quant::Fp8Patches fp8;      // of a kFp8; empty
};

size_t reference_workspace_bytes(const ExecutorSpec& spec);
std::unique_ptr<Executor> make_reference_executor(const ExecutorSpec& spec);

}  // namespace millrace
