#include "backend/cpu/cpu_backend.h"

#include "backend/cpu/context_part.h"
#include "backend/cpu/cpu_executor.h"
#include "backend/cpu/memory.h"
#include "backend/cpu/weight.h"
#include "backend/cpu/workspace.h"
#include "backend/rank_spec.h"
#include "base/error.h"
#include "base/thread_pool.h"
#include "kernels/cpu/tables/features.h"
#include "kernels/quant/kv_types.h"

namespace millrace {
namespace {

// More threads than this is a typing error, not a machine.
constexpr int kMaxThreads = 1024;

class CpuBackend final : public Backend {
 public:
  CpuBackend(const BackendOptions& options, const cpu::KernelTable& kernels)
      : kernels_(kernels),
        group_(options.group),
        shares_(options.shares),
        max_copies_(cpu::private_memory() / 3 / static_cast<size_t>(options.local_ranks)),
        pool_(options.threads, options.topology.empty() ? machine_topology() : options.topology) {}

  std::string_view name() const override { return "cpu"; }
  std::string description() const override {
    const std::string nodes = pool_.nodes() > 1 ? fmt::format(" on {} memory nodes", pool_.nodes()) : "";
    return fmt::format("cpu, {}, {} thread{}{}{}", kernels_.name, threads(), threads() == 1 ? "" : "s", nodes,
                       ranks_text());
  }
  std::string_view isa() const override { return kernels_.name; }
  int threads() const override { return pool_.size(); }
  DType default_kv_type() const override { return DType::kBF16; }
  bool gives_hidden_states() const override { return true; }
  bool supports_kv_type(DType type) const override {
    return type == DType::kF32 || type == DType::kF16 || type == DType::kBF16 || type == DType::kQ8_0 ||
           type == DType::kF8E4M3;
  }

  const dist::Shares* shares() const override { return shares_; }
  OpFeatures lacks() const override {
    OpFeatures missing;
    // Over heads that other ranks have.
    missing.add(OpFeature::kNormWhole,
                group_ != nullptr && !spreads_context() && !shares_->whole_attention());
    for (const OpFeature feature :
         {OpFeature::kHeadSizes, OpFeature::kSharedKeys, OpFeature::kLayerInputs, OpFeature::kExpertNorms}) {
      missing.add(feature, shares_ != nullptr || spreads_context());
    }
    // What a token sees behind it, or keeps beside keys and values, is not spread.
    for (const OpFeature feature : {OpFeature::kState, OpFeature::kStateBeside, OpFeature::kLatent,
                                    OpFeature::kBidirectional, OpFeature::kSparse, OpFeature::kIndexer}) {
      missing.add(feature, spreads_context());
    }
    return missing;
  }

  size_t weight_bytes(const TensorView& view, WeightUse use, size_t before) const override {
    return cpu::held_bytes(view, use, kernels_, limits(before));
  }
  WeightPtr load_weight(const TensorView& view, WeightUse use) override {
    const bool stays = use == WeightUse::kMatrix && weight_bytes(view, use, held_) == 0;
    if (pool_.nodes() > 1 && use == WeightUse::kMatrix && view.matrix_rows == 0) {
      const int64_t matrices = view.rank == 3 ? std::max<int64_t>(1, view.shape[0]) : 1;
      read_ahead_.read_by_node(reinterpret_cast<const uint8_t*>(view.data), matrices, view.rows() / matrices,
                               view.row_stride_bytes, pool_);
    } else if (view.matrix_rows == 0) {
      read_ahead_.read(view.data, static_cast<size_t>(view.rows() * view.row_stride_bytes), stays);
    } else {
      const int64_t rows = view.shape[view.rank - 2];
      for (int64_t r = 0; rows > 0 && r < view.rows(); r += rows) {
        read_ahead_.read(view.row(r), static_cast<size_t>(rows * view.row_stride_bytes), stays);
      }
    }
    WeightPtr weight = cpu::load(view, use, kernels_, limits(held_), pool_, copies_);
    held_ += weight_bytes(view, use, held_);
    return weight;
  }

  size_t workspace_bytes(const ExecutorSpec& spec) const override {
    if (spreads_context()) {
      return cpu::workspace_bytes(spec, int64_t{spec.heads} * spec.head_dim, pool_.size(),
                                  kernels_.quantize_bf16_tile != nullptr) +
             cpu::ContextPart::buffer_bytes(spec, shares_->context_ranks(), shares_->context_schedule());
    }
    const ExecutorSpec local = shares_ == nullptr ? spec : rank_spec(*shares_, spec);
    return cpu::workspace_bytes(local, int64_t{spec.heads} * spec.head_dim, pool_.size(),
                                kernels_.quantize_bf16_tile != nullptr);
  }
  std::unique_ptr<Executor> make_executor(const ExecutorSpec& spec) override {
    if (!supports_kv_type(spec.kv_type)) {
      throw_error(
          ErrorCode::kUnsupported,
          "KV cache type: found {}, the cpu backend has f32, f16, bf16, int8 (q8_0) and fp8 (f8_e4m3)",
          info(spec.kv_type).name);
    }
    if (spec.kv_type == DType::kQ8_0 && spec.latent.rank > 0) {
      throw_error(ErrorCode::kUnsupported,
                  "KV cache type int8: a latent cache has f32, f16, bf16 or fp8 (f8_e4m3)");
    }
    std::vector<int32_t> head_dims = {spec.head_dim};
    for (int g = 0; g < std::ssize(spec.kv_groups); ++g) head_dims.push_back(spec.head_dim_of(g));
    for (const int32_t dim : head_dims) {
      if (spec.kv_type != DType::kQ8_0 || dim % kKvScaleDims == 0) continue;
      throw_error(ErrorCode::kUnsupported,
                  "KV cache type int8: heads of {} dimensions, expected a multiple of {}", dim, kKvScaleDims);
    }
    if (group_ != nullptr && spreads_context()) {
      return std::make_unique<cpu::CpuExecutor>(
          spec, kernels_, pool_,
          std::make_unique<cpu::ContextPart>(*group_, spec, shares_->context_schedule()));
    }
    if (group_ != nullptr)
      return std::make_unique<cpu::CpuExecutor>(spec, kernels_, pool_, *group_, *shares_);
    return std::make_unique<cpu::CpuExecutor>(spec, kernels_, pool_);
  }

  void parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body) override {
    // A handful of chunks per thread, so that a slow core delays little.
    const int64_t chunk = std::max<int64_t>(1, count / (int64_t{8} * pool_.size()));
    pool_.parallel_for(count, chunk, [&](int64_t begin, int64_t end, int) { body(begin, end); });
  }

 private:
  bool spreads_context() const { return shares_ != nullptr && shares_->context_ranks() > 1; }
  std::string ranks_text() const {
    std::string text;
    if (group_ != nullptr) {
      text = fmt::format(", rank {} of {} over {}", group_->rank(), group_->size(), group_->name());
    }
    if (shares_ == nullptr || shares_->stages() == 1) return text;
    return fmt::format("{}, stage {} of {}", text, shares_->stage(), shares_->stages());
  }

  const cpu::KernelTable& kernels_;
  dist::Communicator* const group_;  // absent: this process has the whole model
  const dist::Shares* const shares_;
  const size_t max_copies_;  // a third of the memory: ranks of one machine share it
  ThreadPool pool_;
  cpu::ReadAhead read_ahead_;
  // Less what is held already: the file itself may be in memory too. Where kernels are nearly as quick
  // without, copies are worth less of it, and a part of a node's rows stays on its node.
  cpu::CopyLimits limits(size_t held) const {
    const auto left = [&](size_t most) { return held < most ? most - held : 0; };
#if defined(__x86_64__)
    const size_t most = pool_.nodes() == 1 ? left(max_copies_ / 3) : 0;
    return {most, huge_pages_ ? most : 0};
#else
    return {left(max_copies_), 0};  // huge pages alone: not measured
#endif
  }
#if defined(__x86_64__)
  const bool huge_pages_ = cpu::has_huge_pages();
  cpu::CopyMemory copies_{max_copies_ / 3};
#else
  cpu::CopyMemory copies_{max_copies_};
#endif
  size_t held_ = 0;
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options, std::string_view isa) {
  if (options.threads < 0 || options.threads > kMaxThreads) {
    throw_error(ErrorCode::kBadInput, "threads: found {}, expected 0 to {}", options.threads, kMaxThreads);
  }
  if (options.fp8_prompts) {
    throw_error(ErrorCode::kUnsupported,
                "compute: found fp8 on device cpu, expected full: FP8 products of prompts run on a GPU with "
                "Hopper's tensor cores, and on device reference");
  }
  return std::make_unique<CpuBackend>(options, cpu::choose_table(isa));
}

std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options) {
  return make_cpu_backend(options, cpu::wanted_isa());
}

}  // namespace millrace
