#include "backend/mixed_backend.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "backend/mixed/mixed_executor.h"
#include "backend/mixed/mixed_weight.h"
#include "base/check.h"
#include "base/error.h"

namespace millrace {
namespace mixed {
namespace {

class MixedBackend final : public Backend {
 public:
  MixedBackend(std::unique_ptr<Backend> first, std::unique_ptr<Backend> second, Placement placement,
               std::optional<size_t> memory)
      : first_(std::move(first)),
        second_(std::move(second)),
        placement_(std::move(placement)),
        memory_(first_->own_memory() ? first_->own_memory() : memory),
        name_(fmt::format("{}+{}", first_->name(), second_->name())),
        isa_(fmt::format("{}+{} {}", first_->isa(), second_->isa(), placement_.identity())) {}

  std::string_view name() const override { return name_; }
  std::optional<DeviceEnergy> energy() const override { return first_->energy(); }
  std::string description() const override {
    return fmt::format("{} + {}", first_->description(), second_->description());
  }
  std::string_view isa() const override { return isa_; }
  int threads() const override { return second_->threads(); }
  DType default_kv_type() const override {
    const DType type = first_->default_kv_type();
    return supports_kv_type(type) ? type : second_->default_kv_type();
  }
  int32_t default_step_tokens() const override { return first_->default_step_tokens(); }
  bool supports_kv_type(DType type) const override {
    return (!first_has_layers() || first_->supports_kv_type(type)) &&
           (!second_has_layers() || second_->supports_kv_type(type));
  }
  bool gives_hidden_states() const override {
    return first_->gives_hidden_states() && second_->gives_hidden_states();
  }
  OpFeatures lacks() const override {
    OpFeatures missing;
    if (first_has_layers()) missing = missing | first_->lacks();
    if (second_has_layers()) missing = missing | second_->lacks();
    missing.add(OpFeature::kAdapters);
    missing.add(OpFeature::kTokenShift);  // values of the first layer would have to go along
    // A layer's input and its keys would have to be where the layer is.
    missing.add(OpFeature::kSharedKeys);
    missing.add(OpFeature::kLayerInputs);
    missing.add(OpFeature::kHeadSizes);
    missing.add(OpFeature::kExpertNorms);
    return missing;
  }
  std::optional<size_t> own_memory() const override { return memory_; }
  std::string placement() const override {
    return placement_.text(std::string(first_->name()), std::string(second_->name()));
  }

  size_t weight_bytes(const TensorView& view, WeightUse use, size_t before) const override {
    return first_->weight_bytes(view, use, before);
  }
  size_t dequantized_bytes(const TensorView& view) const override { return first_->dequantized_bytes(view); }
  WeightPtr load_weight(const TensorView& view, WeightUse use) override {
    return load_placed(view, use, {WeightPlace::Part::kOutput, -1});
  }

  size_t placed_bytes(const TensorView& view, WeightUse use, size_t before,
                      const WeightPlace& place) const override {
    if (!on_first(place)) return memory_ ? 0 : second_->weight_bytes(view, use, before);
    if (place.part != WeightPlace::Part::kExperts) return first_->weight_bytes(view, use, before);
    const auto count = std::ssize(layer(place).first_experts);
    return first_->weight_bytes(experts_shape(view, count), use, before);
  }
  size_t placed_dequantized_bytes(const TensorView& view, const WeightPlace& place) const override {
    return on_first(place) && place.part != WeightPlace::Part::kExperts ? first_->dequantized_bytes(view) : 0;
  }
  bool in_machine_memory(const WeightPlace& place) const override {
    return !memory_ || on_second(place, WeightUse::kMatrix);
  }
  WeightPtr load_placed(const TensorView& view, WeightUse use, const WeightPlace& place) override;

  size_t workspace_bytes(const ExecutorSpec& spec) const override {
    return first_->workspace_bytes(spec_of(spec, placement_, Side::kFirst)) + mixed_rows_bytes(spec);
  }
  std::unique_ptr<Executor> make_executor(const ExecutorSpec& spec) override {
    return make_mixed_executor(spec, placement_,
                               first_->make_executor(spec_of(spec, placement_, Side::kFirst)),
                               second_->make_executor(spec_of(spec, placement_, Side::kSecond)));
  }

  std::optional<TuningTarget> tuning_target() const override { return first_->tuning_target(); }
  void use_tuning(const TuningTable& table) override { first_->use_tuning(table); }
  TuningTable autotune(std::span<const TuningShape> shapes, const AutotuneProgress& progress) override {
    return first_->autotune(shapes, progress);
  }
  void parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body) override {
    second_->parallel(count, body);
  }

 private:
  const Placement::Layer& layer(const WeightPlace& place) const {
    MILLRACE_CHECK(place.layer >= 0 && place.layer < std::ssize(placement_.layers));
    return placement_.layers[static_cast<size_t>(place.layer)];
  }
  bool first_has_layers() const { return placement_.layers_on_first() > 0; }
  bool second_has_layers() const { return placement_.layers_on_first() < std::ssize(placement_.layers); }
  bool on_first(const WeightPlace& place) const {
    switch (place.part) {
      case WeightPlace::Part::kEmbedding:
        return placement_.embedding_on_first;
      case WeightPlace::Part::kOutput:
        return true;
      case WeightPlace::Part::kLayer:
        return layer(place).on_first;
      case WeightPlace::Part::kExperts:
        break;
    }
    return !layer(place).first_experts.empty();
  }
  // Where experts are shared out both norm their input: small weights of such a layer are there twice.
  bool on_second(const WeightPlace& place, WeightUse use) const {
    if (place.part == WeightPlace::Part::kExperts) {
      return std::ssize(layer(place).first_experts) < layer(place).experts;
    }
    if (!on_first(place)) return true;
    return place.part == WeightPlace::Part::kLayer && use == WeightUse::kVector &&
           placement_.shares_experts(place.layer);
  }

  const std::unique_ptr<Backend> first_, second_;
  const Placement placement_;
  const std::optional<size_t> memory_;
  const std::string name_, isa_;
};

WeightPtr MixedBackend::load_placed(const TensorView& view, WeightUse use, const WeightPlace& place) {
  auto weight = std::make_unique<MixedWeight>();
  weight->layer = place.layer;
  weight->copied = true;
  const auto load = [&](Backend& backend, const TensorView& part,
                        std::vector<std::unique_ptr<std::byte[]>> gathered) {
    WeightPtr loaded = backend.load_weight(part, use);
    if (!loaded->copied) {
      if (gathered.empty()) weight->copied = false;
      for (auto& piece : gathered) weight->gathered.push_back(std::move(piece));
    }
    return loaded;
  };
  if (place.part != WeightPlace::Part::kExperts) {
    if (on_first(place)) weight->first = load(*first_, view, {});
    if (on_second(place, use)) weight->second = load(*second_, view, {});
  } else {
    const std::vector<int32_t>& mine = layer(place).first_experts;
    std::vector<int32_t> theirs;
    for (int32_t e = 0; e < layer(place).experts; ++e) {
      if (!std::binary_search(mine.begin(), mine.end(), e)) theirs.push_back(e);
    }
    const auto load_experts = [&](Backend& backend, const std::vector<int32_t>& ids) {
      std::vector<std::unique_ptr<std::byte[]>> gathered;
      const TensorView part = experts_view(view, ids, gathered);
      return load(backend, part, std::move(gathered));
    };
    if (!mine.empty()) weight->first = load_experts(*first_, mine);
    if (!theirs.empty()) weight->second = load_experts(*second_, theirs);
  }
  const Weight& part = weight->first ? *weight->first : *weight->second;
  weight->rows = part.rows;
  weight->cols = part.cols;
  weight->experts =
      place.part == WeightPlace::Part::kExperts && view.rank == 3 ? view.shape[0] : part.experts;
  return weight;
}

}  // namespace
}  // namespace mixed

std::unique_ptr<Backend> make_mixed_backend(std::unique_ptr<Backend> first, std::unique_ptr<Backend> second,
                                            mixed::Placement placement, std::optional<size_t> memory) {
  return std::make_unique<mixed::MixedBackend>(std::move(first), std::move(second), std::move(placement),
                                               memory);
}

}  // namespace millrace
