// The cuda backend: one GPU. Weights with blocks of 32 lie in its memory as tiles for the tensor cores, 8-bit
// ones that prompts multiply as bf16 too, others in the file's own encoding.
#include "backend/cuda_backend.h"

#include <algorithm>

#include "backend/cuda/autotune.h"
#include "backend/cuda/cuda_executor.h"
#include "backend/cuda/cuda_weight.h"
#include "backend/cuda/device_link.h"
#include "backend/cuda/gpu_energy.h"
#include "backend/cuda/read_tuning.h"
#include "base/error.h"
#include "base/thread_pool.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/gemm/product_rate.h"
#include "kernels/cuda/linear/state_scan.h"
#include "kernels/cuda/read_bandwidth.h"
#include "kernels/quant/fp8_patches.h"

namespace millrace {
namespace {

int gpu_for(const BackendOptions& options, int gpu) {
  return gpu == kGpuOfRank ? options.local_rank % cuda::Device::count() : gpu;
}

// Ranks of this host that have the same GPU.
int sharers(const BackendOptions& options, int gpu) {
  if (gpu != kGpuOfRank) return options.local_ranks;
  const int gpus = cuda::Device::count(), own = options.local_rank % gpus;
  return (options.local_ranks - own + gpus - 1) / gpus;
}

class CudaBackend final : public Backend {
 public:
  CudaBackend(const BackendOptions& options, int gpu)
      : device_(cuda::Device::open(gpu_for(options, gpu))),
        group_(options.group),
        shares_(options.shares),
        own_memory_((options.memory_bytes > 0
                         ? std::min(options.memory_bytes, device_.info().free_bytes)
                         : static_cast<size_t>(static_cast<double>(device_.info().free_bytes) *
                                               options.memory_fraction)) /
                    static_cast<size_t>(sharers(options, gpu))),
        pool_(options.threads),
        uploader_(device_),
        energy_(device_.ordinal()),
        fp8_prompts_(options.fp8_prompts) {
    if (!fp8_prompts_ || device_.has_wgmma()) return;
    throw_error(
        ErrorCode::kUnsupported,
        "compute: found fp8 on device cuda, {}, {}, expected full, or a GPU with Hopper's tensor cores",
        device_.info().name, device_.info().architecture);
  }

  std::string_view name() const override { return "cuda"; }
  std::string description() const override {
    constexpr double kGiB = 1024.0 * 1024.0 * 1024.0;
    return fmt::format("cuda, {}, {}, {:.1f} GiB{}{}", device_.info().name, device_.info().architecture,
                       static_cast<double>(device_.info().memory_bytes) / kGiB,
                       device_.tuning().empty() ? "" : ", tuned", ranks_text());
  }
  std::string_view isa() const override { return device_.info().architecture; }
  int threads() const override { return pool_.size(); }
  DType default_kv_type() const override { return DType::kBF16; }
  int32_t default_step_tokens() const override { return 4096; }
  bool supports_kv_type(DType type) const override {
    return type == DType::kF32 || type == DType::kF16 || type == DType::kBF16 || type == DType::kF8E4M3;
  }

  bool gives_hidden_states() const override { return true; }
  OpFeatures lacks() const override {
    OpFeatures missing;
    // Over heads that other ranks have; what ranks do not share out.
    missing.add(OpFeature::kNormWhole, group_ != nullptr && !shares_->whole_attention());
    for (const OpFeature feature : {OpFeature::kHeadSizes, OpFeature::kSharedKeys, OpFeature::kLayerInputs,
                                    OpFeature::kExpertNorms, OpFeature::kSparse, OpFeature::kIndexer,
                                    OpFeature::kAdapters, OpFeature::kExpertAdapters, OpFeature::kImages}) {
      missing.add(feature, shares_ != nullptr);
    }
    return missing;
  }
  std::optional<double> measure_read_bandwidth() override {
    device_.use();
    const cuda::Stream stream;
    return cuda::measure_read_bandwidth({device_, stream.get()});
  }
  std::optional<double> measure_products() override {
    if (!device_.has_wgmma()) return std::nullopt;
    device_.use();
    const cuda::Stream stream;
    return cuda::measure_product_rate(fp8_prompts_ ? cuda::DenseType::kE4m3 : cuda::DenseType::kBf16,
                                      {device_, stream.get()});
  }
  std::optional<DeviceEnergy> energy() const override {
    const std::optional<double> joules = energy_.joules();
    if (!joules) return std::nullopt;
    return DeviceEnergy{"gpu " + energy_.bus_id(), *joules};
  }
  std::optional<size_t> own_memory() const override { return own_memory_; }
  const dist::Shares* shares() const override { return shares_; }
  std::vector<DeviceLinkSpeed> measure_device_links() override;

  size_t weight_bytes(const TensorView& view, WeightUse use, size_t) const override {
    return cuda::device_weight_bytes(view, use);
  }
  size_t dequantized_bytes(const TensorView& view) const override {
    return multiplies_fp8(view) ? 0 : cuda::device_dequantized_bytes(view, device_);
  }
  bool multiplies_fp8(const TensorView& view) const override {
    return fp8_prompts_ && quant::fits_fp8_patches(view);
  }
  WeightPtr load_weight(const TensorView& view, WeightUse use) override {
    if (use != WeightUse::kFp8) return uploader_.upload(view, use);
    quant::Fp8Patches fp8 = quant::shaped_fp8_patches(view);
    parallel(fp8.patch_rows(), [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) quant::fill_fp8_patches(view, p, fp8);
    });
    return uploader_.upload(view, use, &fp8);
  }

  // kernels/cuda/attention/kv_fp8.cuh
  size_t key_head_bytes(const ExecutorSpec& spec) const override {
    if (spec.kv_type != DType::kF8E4M3) return Backend::key_head_bytes(spec);
    return kBlockTokens * (static_cast<size_t>(spec.head_dim) + 2);
  }
  size_t workspace_bytes(const ExecutorSpec& spec) const override {
    if (shares_rows()) return cuda::executor_workspace_bytes(spec, device_, *shares_);
    return cuda::executor_workspace_bytes(spec, device_);
  }
  std::unique_ptr<Executor> make_executor(const ExecutorSpec& spec) override {
    if (!supports_kv_type(spec.kv_type)) {
      throw_error(ErrorCode::kUnsupported, "device cuda: KV cache type {}, expected f32, f16, bf16 or fp8",
                  info(spec.kv_type).name);
    }
    if (spec.state.key_dim > cuda::kMaxStateKeyDim) {
      throw_error(ErrorCode::kUnsupported, "device cuda: a state of {} key dimensions, expected at most {}",
                  spec.state.key_dim, cuda::kMaxStateKeyDim);
    }
    if (group_ != nullptr) return cuda::make_cuda_executor(spec, device_, *group_, *shares_);
    return cuda::make_cuda_executor(spec, device_);
  }

  std::optional<TuningTarget> tuning_target() const override {
    return TuningTarget{device_.info().name, cuda::driver_version(),
                        fmt::format("CUDA {}, kernels {}", cuda::runtime_version(), cuda::kKernelRevision)};
  }
  void use_tuning(const TuningTable& table) override { device_.use_tuning(cuda::read_tuning(table)); }
  TuningTable autotune(std::span<const TuningShape> shapes, const AutotuneProgress& progress) override {
    device_.use_tuning({});  // the first candidate is the built-in choice
    return cuda::autotune(device_, *tuning_target(), shapes, progress);
  }

  void parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body) override {
    const int64_t chunk = count / (int64_t{pool_.size()} * 4) + 1;  // a few chunks each, to even out
    pool_.parallel_for(count, chunk, [&](int64_t begin, int64_t end, int) { body(begin, end); });
  }

 private:
  bool shares_rows() const { return shares_ != nullptr && (shares_->stages() == 1 || shares_->ranks() > 1); }
  std::string ranks_text() const {
    std::string text;
    if (group_ != nullptr) {
      text = fmt::format(", rank {} of {} over {}", group_->rank(), group_->size(), group_->name());
    }
    if (shares_ == nullptr || shares_->stages() == 1) return text;
    return fmt::format("{}, stage {} of {}", text, shares_->stage(), shares_->stages());
  }

  cuda::Device device_;              // first: everything else is made on it
  dist::Communicator* const group_;  // absent: this process has the whole model, or whole layers of it
  const dist::Shares* const shares_;
  size_t own_memory_;
  ThreadPool pool_;
  cuda::WeightUploader uploader_;
  cuda::GpuEnergy energy_;
  const bool fp8_prompts_;
};

std::vector<DeviceLinkSpeed> CudaBackend::measure_device_links() {
  if (group_ == nullptr) return {};
  std::vector<DeviceLinkSpeed> speeds;
  const auto measure = [&](cuda::LinkKind kind) {
    const auto link = cuda::make_device_link(*group_, device_, cuda::kMeasuredValues, kind);
    if (!speeds.empty() && speeds.back().name == link->name()) return;
    speeds.push_back(cuda::measure(*link, *group_, device_));
  };
  measure(cuda::LinkKind::kStaged);
  measure(cuda::LinkKind::kAuto);
  return speeds;
}

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(const BackendOptions& options, int gpu) {
  if (options.threads < 0) {
    throw_error(ErrorCode::kBadInput, "threads: found {}, expected 0 (one per core) or more",
                options.threads);
  }
  return std::make_unique<CudaBackend>(options, gpu);
}

}  // namespace millrace
