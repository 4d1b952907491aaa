// Model: a checkpoint's weights on a backend, and its forward pass: the layers are what its Architecture
// says.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "backend/adapter_table.h"
#include "backend/backend.h"
#include "io/checkpoint.h"
#include "model/adapter.h"
#include "model/config.h"
#include "model/weight_spec.h"
#include "quant/feedback.h"
#include "quant/type_request.h"

namespace millrace {

class Architecture;
class WeightSource;

// The type a weight is turned into while it is loaded, by its GGUF name; its own: it stays where it lies.
// `tied`: the embedding serves as output matrix.
using TypeChoice = std::function<DType(const std::string& name, const TensorView& view, bool tied)>;
TypeChoice type_choice(const quant::TypeRequest& request);
// What the encoder may know of a matrix's inputs, by its GGUF name; nullptr: nothing.
using InputsOf = std::function<const quant::MatrixInputs*(const std::string& name)>;

// Called with done and total bytes while weights are taken in.
using LoadProgress = std::function<void(size_t done, size_t total)>;

// How a weight was stored when the backend took it in.
struct StoredWeight {
  DType type = DType::kF32;
  size_t bytes = 0;  // of all of it, scales beside it included
  std::string name;  // in a GGUF file: of one, as it has it (a fused matrix for each of its parts)
                     // but for parts of each head (HeadsOf), which have their own
};

class Model {
 public:
  // The checkpoint must outlive the model: weights stay in its mapping, but for those that `quantize` turns
  // into another type on the backend's threads. `besides`: what its steps will ask
  // for beside its operations (adapters).
  static std::unique_ptr<Model> load(const io::Checkpoint& checkpoint, Backend& backend,
                                     const LoadProgress& progress = {}, const TypeChoice& quantize = {},
                                     const InputsOf& inputs = {}, const OpFeatures& besides = {});
  // Takes adapters in, numbered in this order (SequenceSlice::adapter). Once, before the first step; for a
  // model that was loaded with these features. Throws Error naming a matrix that cannot be adapted.
  void add_adapters(std::vector<Adapter> adapters, Backend& backend);

  const ModelConfig& config() const { return config_; }
  // Bytes one decoded token must read from the weights (experts: only the chosen ones).
  size_t bytes_per_token() const { return bytes_per_token_; }
  // What packed weights (quantized_weights) were read as, in words; empty where there are none.
  const std::string& unpacked() const { return unpacked_; }
  const StoredWeight& stored_weight(const Weight& weight) const { return stored_.at(&weight); }

  // For contexts beyond context_length of a model with angles for those (rope_long_inv_freq).
  void settle_context(int32_t max_context) {
    if (!config_.rope_long_inv_freq.empty() && max_context > config_.context_length) {
      config_.rope_inv_freq = config_.rope_long_inv_freq;
    }
  }

  // One step: logits of batch.logit_rows are in executor.logits() afterwards. Of a stage of a pipeline (the
  // backend's shares) its layers only: `receive` puts what the stage before made into the residual stream,
  // and where another stage follows executor.start() is called at the end.
  void forward(Executor& executor, const Batch& batch, const std::function<void()>& receive = {}) const;
  // The hidden state of one row of that step behind the last norm, [hidden].
  void read_hidden(Executor& executor, int32_t row, std::span<float> to) const;

 private:
  Model() = default;
  const Weight* find_weight(int layer, std::string_view role) const;  // nullptr: there is none

  const Architecture* architecture_ = nullptr;
  ModelConfig config_;
  dist::Range layers_;  // those that it has
  ModelWeights weights_;
  size_t bytes_per_token_ = 0;
  std::string unpacked_;
  std::unordered_map<const Weight*, StoredWeight> stored_;
  std::vector<std::unique_ptr<std::byte[]>> gathered_;  // weights that did not stay in the mapping
  std::vector<Adapter> adapters_;                       // their numbers; the weights below point to them
  std::vector<WeightPtr> adapter_weights_;
  AdapterTable adapter_table_;
};

// What loading would cost on this backend, without loading: bytes in the file, bytes held beyond it; of
// copies that only prompts read (WeightUse::kDequantized), beside those.
struct WeightBytes {
  size_t mapped = 0, repacked = 0, dequantized = 0;
  size_t on_machine = 0;  // of a device that is two: copies in the machine's memory, beside `repacked`
};
// Whether copies that only prompts read are made: all of a model's or none, where they take no more than an
// eighth of what the other weights leave of the device's memory. The rest is the KV cache's.
bool keeps_dequantized(size_t dequantized, size_t repacked, size_t memory);
WeightBytes plan_weights(const io::Checkpoint& checkpoint, const ModelConfig& config, const Backend& backend,
                         const TypeChoice& quantize = {});

// What each part of the model would take of this backend's memory.
struct WeightSizes {
  struct Layer {
    size_t dense = 0, experts = 0;
  };
  size_t embedding = 0, output = 0;  // an embedding that is the output matrix too: output
  std::vector<Layer> layers;
};
WeightSizes weight_sizes(const io::Checkpoint& checkpoint, const ModelConfig& config, const Backend& backend,
                         const TypeChoice& quantize = {});

// A bias beside a weight that is read, where the architecture has no place for one: its logits would be wrong
// without a word.
void refuse_unread_biases(const io::Checkpoint& checkpoint, const ModelConfig& config);

// Every weight the model uses under its GGUF name, whatever the checkpoint calls it, with what the
// architecture says of it, in one order for all files.
using WeightVisitor =
    std::function<void(const std::string& name, const WeightSpec& spec, const TensorView& view)>;
void visit_weights(WeightSource& source, const ModelConfig& config, const WeightVisitor& visit);
// No output matrix: the embedding is used as one.
bool has_tied_output(const io::Checkpoint& checkpoint);

}  // namespace millrace
