// WeightSource: finds a model's tensors by their role, whatever the file calls them and however it packs
// them, and checks their shapes. Views point into the mapping; only what a file stores in pieces (one tensor
// per expert) or transposed is gathered into memory of its own.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint.h"
#include "model/config.h"
#include "model/weight_spec.h"

namespace millrace {

class Architecture;

class WeightSource {
 public:
  // `gather` false: plan only; gathered views then have no data, but their bytes are counted.
  WeightSource(const io::Checkpoint& checkpoint, const ModelConfig& config, bool gather);

  // What the architecture says of a layer's weights; layer -1: of those outside the layers, which are the
  // embedding, the last norm and the output matrix, in this order, and what the architecture has besides.
  const std::vector<WeightSpec>& specs(int layer);

  // `role` is one of the layer's specs. The shape must be the given one (of experts: [experts, rows, cols]);
  // throws Error{kBadInput} naming the tensor otherwise. A role the architecture has not is not found.
  TensorView require(int layer, std::string_view role, std::vector<int64_t> shape);
  std::optional<TensorView> find(int layer, std::string_view role, std::vector<int64_t> shape);

  size_t gathered_bytes() const { return gathered_bytes_; }
  // The gathered copies, to be kept as long as the views are used.
  std::vector<std::unique_ptr<std::byte[]>> take_gathered() { return std::move(gathered_); }

 private:
  const WeightSpec* spec_of(int layer, std::string_view role);
  // Every name the tensor may have in this checkpoint.
  std::vector<std::string> names_of(int layer, const WeightSpec& spec) const;
  std::optional<TensorView> find_plain(int layer, const WeightSpec& spec) const;
  // Experts of a Hugging Face directory.
  std::string expert_name(int layer, const HfExperts& experts, std::string_view rest) const;
  std::optional<TensorView> find_experts(int layer, const WeightSpec& spec);
  std::optional<TensorView> gather_single(int layer, const HfExperts& experts);
  std::optional<TensorView> find_fused_bias(int layer, const HfExperts& experts) const;
  std::optional<TensorView> find_fused_blocks(int layer, const HfExperts& experts) const;
  std::optional<TensorView> gather_transposed(int layer, const WeightSpec& spec);
  std::optional<TensorView> gather_stacked(int layer, const WeightSpec& spec);
  // What a file has as rows of something larger, turned around, or less a number.
  std::optional<TensorView> find_part(int layer, const WeightSpec& spec) const;
  TensorView gather_turned(const TensorView& from);
  TensorView gather_offset(const TensorView& from, float offset);
  void attach_scales(TensorView& view, const std::string& base_name) const;
  std::byte* own(size_t bytes);

  const io::Checkpoint& checkpoint_;
  const ModelConfig& config_;
  const Architecture& architecture_;
  std::map<int, std::vector<WeightSpec>> specs_;  // by layer, as they are asked for
  bool gather_;
  size_t gathered_bytes_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> gathered_;
};

}  // namespace millrace
