// From a Hugging Face config.json to the GGUF file that model would be: metadata, and tensors with their
// types.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "io/gguf_writer.h"
#include "model/config.h"
#include "tensor/dtype.h"

namespace millrace::cli {

struct SynthTensor {
  std::string name;
  DType type = DType::kF32;
  std::vector<int64_t> shape;  // slowest first
  double sigma = 0.0;          // spread of random values; 0: `values`, or ones where that is empty
  std::vector<float> values;
};

struct SynthPlan {
  io::Checkpoint checkpoint;  // a Hugging Face directory of which there is the config.json alone
  ModelConfig config;         // what the architecture reads there
  std::vector<SynthTensor> tensors;
};

struct SynthTypes {
  DType matrix = DType::kQ8_0;   // attention, dense layers, embeddings, output
  std::optional<DType> experts;  // expert matrices; none: as published, or the matrices'
};

// `source` names the config in messages. Where a row does not fill a type's blocks the tensor falls back to
// q8_0, and where that does not fit either to f16. Throws Error for a config that is no supported model.
SynthPlan make_plan(const nlohmann::json& config, const std::string& source, const SynthTypes& types);

}  // namespace millrace::cli
