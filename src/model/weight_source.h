// WeightSource: finds a model's tensors by their role, whatever the file calls them and however it packs
// them, and checks their shapes. Views point into the mapping; only what a file stores in pieces (one tensor
// per expert) or transposed is gathered into memory of its own.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint.h"
#include "model/config.h"

namespace millrace {

class WeightSource {
 public:
  // `gather` false: plan only; gathered views then have no data, but their bytes are counted.
  WeightSource(const io::Checkpoint& checkpoint, const ModelConfig& config, bool gather);

  // `role` is GGUF's name without "blk.N." ("attn_q.weight"); layer -1 for those outside the layers. The
  // shape must be the given one (of experts: [experts, rows, cols]); throws Error{kBadInput} naming the
  // tensor otherwise.
  TensorView require(int layer, std::string_view role, std::vector<int64_t> shape);
  std::optional<TensorView> find(int layer, std::string_view role, std::vector<int64_t> shape);

  size_t gathered_bytes() const { return gathered_bytes_; }
  // The gathered copies, to be kept as long as the views are used.
  std::vector<std::unique_ptr<std::byte[]>> take_gathered() { return std::move(gathered_); }

 private:
  const TensorView* find_named(int layer, std::string_view role, std::string* tried) const;
  std::optional<TensorView> find_hf_experts(int layer, std::string_view role) const;
  std::optional<TensorView> gather_expert_tensors(int layer, std::string_view role);
  std::optional<TensorView> gather_transposed(int layer, std::string_view role);
  void attach_scales(TensorView& view, const std::string& base_name) const;
  std::byte* own(size_t bytes);

  const io::Checkpoint& checkpoint_;
  const ModelConfig& config_;
  bool gather_;
  size_t gathered_bytes_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> gathered_;
};

}  // namespace millrace
