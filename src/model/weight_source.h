// WeightSource: finds a model's tensors by their role, whatever the file calls them and however it packs
// them, and checks their shapes. Views point into the mapping; only what a file stores in pieces (one tensor
// per expert), transposed or packed in a way of its own (quantized_weights) is gathered into memory of its
// own.
#pragma once

#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dist/shares.h"
#include "io/checkpoint.h"
#include "model/config.h"
#include "model/quantized_weights/quantized_weight.h"
#include "model/weight_spec.h"

namespace millrace {

class Architecture;
struct HfNames;

// Is this a Hugging Face directory whose output matrix is its embedding, stored under the output's name
// alone?
bool has_output_alone(const io::Checkpoint& checkpoint, const HfNames& names);

class WeightSource {
 public:
  // Runs body(begin, end) over [0, count) on whatever threads there are.
  using Parallel = std::function<void(int64_t count, const std::function<void(int64_t, int64_t)>& body)>;

  // `gather` false: plan only; gathered views then have no data, but their bytes are counted. `parallel`:
  // what packed weights are unpacked with; absent: one thread.
  WeightSource(const io::Checkpoint& checkpoint, const ModelConfig& config, bool gather,
               Parallel parallel = {});

  // Of experts that have to be gathered only these are, of a rank that has whole ones: the rest of a view has
  // addresses, and no memory behind them.
  void gather_only(dist::Range experts) { wanted_experts_ = experts; }

  // What the architecture says of a layer's weights; layer -1: of those outside the layers, which are the
  // embedding, the last norm and the output matrix, in this order, and what the architecture has besides.
  const std::vector<WeightSpec>& specs(int layer);

  // `role` is one of the layer's specs. The shape must be the given one (of experts: [experts, rows, cols]);
  // throws Error{kBadInput} naming the tensor otherwise. A role the architecture has not is not found.
  TensorView require(int layer, std::string_view role, std::vector<int64_t> shape);
  std::optional<TensorView> find(int layer, std::string_view role, std::vector<int64_t> shape);
  // Whether the checkpoint stores it, in whatever form; nothing is gathered. Not for experts.
  bool has(int layer, std::string_view role);

  // Every name that a weight of the layer may have in this checkpoint, or what it is a part of.
  std::set<std::string> all_names(int layer);

  // How many packed weights, of those found so far, were unpacked from each scheme into each type.
  using Unpacked = std::map<std::pair<std::string, DType>, int64_t>;
  const Unpacked& unpacked() const { return unpacked_; }

  size_t gathered_bytes() const { return gathered_bytes_; }
  // The gathered copies, to be kept as long as the views are used.
  std::vector<std::unique_ptr<std::byte[]>> take_gathered() { return std::move(gathered_); }

 private:
  const WeightSpec* spec_of(int layer, std::string_view role);
  // Every name the tensor may have in this checkpoint.
  std::vector<std::string> names_of(int layer, const WeightSpec& spec) const;
  // A weight as it is stored: a view, or, packed, the reader of its rows beside a view without data.
  struct Stored {
    TensorView view;
    std::shared_ptr<const RowReader> packed = nullptr;
    std::string scheme = {};
  };
  // `rows`, `cols`: what it has to have.
  std::optional<Stored> find_stored(const std::string& name, int64_t rows, int64_t cols);
  void unpack(const Stored& stored, DType type, std::byte* to) const;
  std::optional<TensorView> find_plain(int layer, const WeightSpec& spec);
  // GGUF: one tensor with the gate's rows of each expert and behind them the rows of `up`.
  std::optional<TensorView> gather_gate_up(int layer, const WeightSpec& spec);
  // GGUF: X.scale beside X.weight, a factor for all of it or one for each expert.
  TensorView gather_tiled(const TensorView& from, const HeadTiles& tiles);
  bool has_own_scale(int layer, std::string_view role);
  void attach_factor(TensorView& view, const std::string& base_name) const;
  // Experts of a Hugging Face directory.
  std::string expert_name(int layer, const HfExperts& experts, std::string_view rest) const;
  std::optional<TensorView> find_experts(int layer, const WeightSpec& spec);
  std::optional<TensorView> gather_single(int layer, const WeightSpec& spec);
  TensorView gather_packed(const std::vector<Stored>& parts);
  std::optional<TensorView> find_fused_bias(int layer, const HfExperts& experts) const;
  std::optional<TensorView> find_fused_blocks(int layer, const HfExperts& experts) const;
  TensorView gather_transposed(const TensorView& fused, const HfExperts& experts);
  std::optional<TensorView> gather_stacked(int layer, const WeightSpec& spec);
  // What a file has as rows of something larger, turned around, or less a number.
  std::optional<TensorView> find_part(int layer, const WeightSpec& spec);
  std::optional<TensorView> gather_heads(int layer, const WeightSpec& spec);
  std::optional<TensorView> gather_rows(int layer, const WeightSpec& spec);
  TensorView gather_turned(const TensorView& from);
  TensorView gather_offset(const TensorView& from, float offset);
  TensorView gather_scaled(const TensorView& from, float scale);
  TensorView gather_negative_exp(const TensorView& from);
  void attach_scales(TensorView& view);
  std::byte* own(size_t bytes);
  // The same for all experts; only those of wanted_experts_ are counted.
  std::byte* own_experts(int64_t experts, size_t bytes_of_each);
  bool wants(int64_t expert) const { return expert >= wanted_experts_.begin && expert < wanted_experts_.end; }

  const io::Checkpoint& checkpoint_;
  const ModelConfig& config_;
  const Architecture& architecture_;
  std::map<int, std::vector<WeightSpec>> specs_;  // by layer, as they are asked for
  bool gather_;
  dist::Range wanted_experts_{0, INT64_MAX};
  Parallel parallel_;
  Unpacked unpacked_;
  size_t gathered_bytes_ = 0;
  std::vector<std::unique_ptr<std::byte[]>> gathered_;
};

// What error messages call a shape: "[64, 2048]".
std::string shape_text(std::span<const int64_t> shape);
void set_shape(TensorView& view, std::initializer_list<int64_t> shape);

}  // namespace millrace
