// The tensors of a GGUF file made from any checkpoint: their names and shapes there, where their rows come
// from, and the types they get.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "model/config.h"
#include "model/weight_spec.h"
#include "quant/recode.h"
#include "quant/type_request.h"

namespace millrace {

struct OutTensor {
  std::string name;   // GGUF's
  TensorView source;  // without data where a checkpoint stores it in pieces: visit_tensors() has those
  DType type = DType::kF32;
  quant::RowOrder order;
  quant::Part part = quant::Part::kSmall;
  std::vector<float> values;  // not empty: the tensor itself, made here rather than stored

  std::vector<int64_t> shape() const;
  size_t bytes() const { return bytes_of(type, source.elements()); }
};

// In the order they are written. GGUF: everything the file has. Hugging Face: what the architecture uses.
std::vector<OutTensor> list_tensors(const io::Checkpoint& checkpoint,
                                    const std::optional<ModelConfig>& config);

// Matrices of a Hugging Face directory whose columns stand in another order in the list: that order. None of
// a GGUF file.
std::map<std::string, HeadTiles> moved_columns(const io::Checkpoint& checkpoint, const ModelConfig& config);

// Hands every tensor to `take`, its source complete, in the order of the list; gathered copies live until the
// next.
void visit_tensors(const io::Checkpoint& checkpoint, const std::optional<ModelConfig>& config,
                   const std::vector<OutTensor>& tensors,
                   const std::function<void(size_t index, const TensorView& source)>& take);

}  // namespace millrace
