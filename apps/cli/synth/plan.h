// From a Hugging Face config.json to the GGUF file that model would be: metadata, and tensors with their
// types.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/gguf_writer.h"
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
  std::string architecture, name;
  int32_t vocab = 0;
  nlohmann::json config;
  std::vector<SynthTensor> tensors;
};

struct SynthTypes {
  DType matrix = DType::kQ8_0;   // attention, dense layers, embeddings, output
  DType experts = DType::kQ8_0;  // expert matrices
};

// `source` names the config in messages. Where a row does not fill a type's blocks the tensor falls back to
// q8_0, and where that does not fit either to f16. Throws Error for a config that is no supported model.
SynthPlan make_plan(const nlohmann::json& config, const std::string& source, const SynthTypes& types);

// Which type experts have when the user does not say: mxfp4 for gpt-oss, as published; else the matrices'.
DType default_expert_type(const nlohmann::json& config, DType matrix);

// The metadata, tokenizer and chat template included.
void write_metadata(const SynthPlan& plan, io::GgufWriter& writer);

}  // namespace millrace::cli
