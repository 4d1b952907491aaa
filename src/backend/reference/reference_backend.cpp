#include "backend/reference/reference_backend.h"

#include "backend/reference/reference_executor.h"
#include "base/error.h"
#include "kernels/quant/codec.h"
#include "kernels/quant/fp8_patches.h"

namespace millrace {
namespace {

class ReferenceBackend final : public Backend {
 public:
  explicit ReferenceBackend(bool fp8_prompts) : fp8_prompts_(fp8_prompts) {}
  std::string_view name() const override { return "reference"; }
  std::string description() const override { return "reference (naive float32, double sums, 1 thread)"; }
  std::string_view isa() const override { return "none"; }
  int threads() const override { return 1; }
  DType default_kv_type() const override { return DType::kF32; }
  bool gives_hidden_states() const override { return true; }
  bool supports_kv_type(DType type) const override { return type == DType::kF32; }

  size_t weight_bytes(const TensorView& view, WeightUse use, size_t) const override {
    if (use == WeightUse::kFp8) return quant::fp8_patches_bytes(view);
    return use == WeightUse::kVector ? static_cast<size_t>(view.elements()) * sizeof(float) : 0;
  }
  bool multiplies_fp8(const TensorView& view) const override {
    return fp8_prompts_ && quant::fits_fp8_patches(view);
  }

  WeightPtr load_weight(const TensorView& view, WeightUse use) override {
    auto weight = std::make_unique<ReferenceWeight>();
    weight->view = view;
    weight->experts = view.rank == 3 ? view.shape[0] : 1;
    weight->cols = view.cols();
    weight->rows = view.rows() / weight->experts;
    if (use == WeightUse::kFp8) {
      weight->fp8 = quant::shaped_fp8_patches(view);
      for (int64_t p = 0; p < weight->fp8.patch_rows(); ++p) quant::fill_fp8_patches(view, p, weight->fp8);
    }
    if (use == WeightUse::kVector) {
      weight->values.resize(static_cast<size_t>(view.elements()));
      for (int64_t r = 0; r < view.rows(); ++r) {
        quant::dequantize_row(view, r, weight->values.data() + r * view.cols());
      }
    }
    return weight;
  }

  size_t workspace_bytes(const ExecutorSpec& spec) const override { return reference_workspace_bytes(spec); }
  std::unique_ptr<Executor> make_executor(const ExecutorSpec& spec) override {
    return make_reference_executor(spec);
  }
  void parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body) override { body(0, count); }

 private:
  const bool fp8_prompts_;
};

}  // namespace

std::unique_ptr<Backend> make_reference_backend(bool fp8_prompts) {
  return std::make_unique<ReferenceBackend>(fp8_prompts);
}

}  // namespace millrace
