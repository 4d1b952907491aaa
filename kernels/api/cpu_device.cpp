#include "kernels/api/cpu_device.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/paging.h"
#include "kernels/cpu/attention/rotary.h"
#include "kernels/cpu/matmul/gemm.h"
#include "kernels/cpu/moe/experts.h"
#include "kernels/cpu/norm/norm.h"
#include "kernels/cpu/quant/encoder.h"
#include "kernels/cpu/sample/draw.h"
#include "kernels/cpu/tables/features.h"
#include "kernels/quant/codec.h"
#include "kernels/quant/kv_types.h"

namespace millrace::api {
namespace {

constexpr int64_t kNormedPerTask = 16, kCodedPerTask = 16;  // rows
constexpr float kGreedyBelow = 1e-6f;                       // of temperatures

const cpu::KernelTable& table_of(const char* isa) {
  if (isa == nullptr) return *cpu::runnable_tables().back();
  std::string names;
  for (const cpu::KernelTable* table : cpu::runnable_tables()) {
    if (std::strcmp(isa, table->name) == 0) return *table;
    names += (names.empty() ? "" : ", ") + std::string(table->name);
  }
  throw_error(ErrorCode::kUnsupported, "isa: found \"{}\", this machine can run {}", isa, names);
}

const cpu::WeightMatrix& matrix_of(const mr_weight* weight) {
  return static_cast<const CpuDeviceWeight*>(weight)->matrix;
}

uint8_t* bytes_at(void* workspace) { return static_cast<uint8_t*>(workspace); }

struct MatmulMemory {
  cpu::GemmScratch* scratch;
  cpu::QuantizedActivations input;
};
MatmulMemory take_matmul(cpu::Arena& arena, const cpu::WeightMatrix& w, int64_t rows, int threads,
                         bool with_bf16_tiles) {
  return {cpu::take_gemm_scratch(arena, threads, w.cols),
          cpu::take_quantized(arena, rows, w.cols, with_bf16_tiles)};
}

struct MoeMemory {
  cpu::GemmScratch* scratch;
  cpu::MoeWorkspace moe;
};
MoeMemory take_moe(cpu::Arena& arena, const mr_moe_args& args, int threads, bool with_bf16_tiles) {
  const cpu::WeightMatrix& gate = matrix_of(args.gate);
  const cpu::MoeShape shape{args.rows, gate.cols, gate.rows, gate.experts, args.k};
  return {cpu::take_gemm_scratch(arena, threads, std::max(gate.cols, gate.rows)),
          cpu::take_moe_workspace(arena, shape, with_bf16_tiles)};
}

}  // namespace

CpuDevice::CpuDevice(const mr_device_options& options)
    : kernels_(table_of(options.isa)), pool_(options.threads) {
  description_ =
      fmt::format("cpu, {}, {} thread{}", kernels_.name, pool_.size(), pool_.size() == 1 ? "" : "s");
}

std::unique_ptr<mr_device> open_cpu_device(const mr_device_options& options) {
  return std::make_unique<CpuDevice>(options);
}

// ---------------------------------------------------------------- attention

size_t CpuDevice::kv_block_bytes(const mr_attention_config& config) const {
  const auto type = static_cast<DType>(config.kv_type);
  if (type != DType::kF32 && type != DType::kF16 && type != DType::kBF16 && type != DType::kQ8_0 &&
      type != DType::kF8E4M3) {
    throw_error(ErrorCode::kUnsupported, "kv_type is {}, a CPU has f32, f16, bf16, f8_e4m3 and q8_0",
                info(type).name);
  }
  if (type == DType::kQ8_0 && config.head_dim % kKvScaleDims != 0) {
    throw_error(ErrorCode::kUnsupported,
                "kv_type is q8_0 with heads of {} dimensions, expected a multiple of {}", config.head_dim,
                kKvScaleDims);
  }
  size_t bytes =
      kv_head_bytes(type, config.head_dim) * 2 * kBlockTokens * static_cast<size_t>(config.kv_heads);
  // A vector behind the last value may be loaded past it: one more cache line.
  if (config.head_dim % cpu::kLanes != 0) bytes += 64;
  return (bytes + 15) / 16 * 16;
}

size_t CpuDevice::attention_workspace_bytes(const mr_attention_config& config) const {
  kv_block_bytes(config);  // throws for types it has no kernels for
  return cpu_attention_workspace_bytes(config, pool_.size());
}

std::unique_ptr<mr_attention> CpuDevice::make_attention(const mr_attention_config& config, void* workspace) {
  return make_cpu_attention(config, kernels_, pool_, workspace);
}

// ---------------------------------------------------------------- products

size_t CpuDevice::weight_bytes(const TensorView& matrix) const {
  cpu::weight_matrix(matrix);  // throws for types it has no kernels for
#if defined(__x86_64__)
  return 0;  // a copy is made anew by callers that know no weights but those of a call
#else
  return cpu::interleaved_bytes(matrix, kernels_);
#endif
}

std::unique_ptr<mr_weight> CpuDevice::make_weight(const TensorView& matrix, void* memory) {
  return std::make_unique<CpuDeviceWeight>(
      *this, weight_bytes(matrix) > 0 ? cpu::interleave(matrix, kernels_, bytes_at(memory), pool_)
                                      : cpu::weight_matrix(matrix));
}

size_t CpuDevice::matmul_workspace_bytes(const mr_weight& weight, int64_t rows) const {
  cpu::Arena count(nullptr);
  take_matmul(count, matrix_of(&weight), rows, pool_.size(), has_bf16_tiles());
  return count.used();
}

void CpuDevice::matmul(const mr_matmul_args& args, void* workspace, mr_stream) {
  const cpu::WeightMatrix& w = matrix_of(args.weight);
  cpu::Arena arena(bytes_at(workspace));
  const MatmulMemory memory = take_matmul(arena, w, args.rows, pool_.size(), has_bf16_tiles());
  const cpu::Context ctx = context(memory.scratch);
  const cpu::GemmProduct product{{&w, args.bias}, args.y, args.y_stride};
  const cpu::ActivationFormats formats = cpu::formats_for(kernels_, {product.weights}, args.rows);
  const cpu::ActivationRows x =
      cpu::quantize_rows(ctx, formats, args.x, args.rows, w.cols, memory.input, args.x_stride);
  if (args.accumulate != 0) {
    cpu::gemm_add(ctx, product, x, args.rows);
  } else {
    cpu::gemm(ctx, {&product, 1}, x, args.rows);
  }
}

// ---------------------------------------------------------------- experts

void CpuDevice::moe_route(const float* scores, int64_t rows, int32_t experts, int32_t k,
                          mr_softmax_over softmax_over, int32_t* chosen, float* weights, mr_stream) {
  const auto over =
      softmax_over == MR_SOFTMAX_ALL ? cpu::TopK::SoftmaxOver::kAll : cpu::TopK::SoftmaxOver::kChosen;
  cpu::route_top_k_rows(context(), {experts, k, over, scores, chosen, weights}, rows);
}

size_t CpuDevice::moe_workspace_bytes(const mr_moe_args& args) const {
  cpu::Arena count(nullptr);
  take_moe(count, args, pool_.size(), has_bf16_tiles());
  return count.used();
}

void CpuDevice::moe(const mr_moe_args& args, void* workspace, mr_stream) {
  const cpu::WeightMatrix& gate = matrix_of(args.gate);
  for (int64_t i = 0; i < args.rows * args.k; ++i) {
    require_range(args.chosen[i], 0, gate.experts - 1, "args.chosen");
  }
  cpu::Arena arena(bytes_at(workspace));
  MoeMemory memory = take_moe(arena, args, pool_.size(), has_bf16_tiles());
  const Activation activation =
      args.activation == MR_CLAMPED_SWIGLU ? Activation::kClampedSwiglu : Activation::kSilu;
  cpu::moe_experts(
      context(memory.scratch),
      {{{&gate, args.gate_bias}, {&matrix_of(args.up), args.up_bias}, activation, args.alpha, args.limit},
       {&matrix_of(args.down), args.down_bias},
       args.k,
       args.chosen,
       args.weights,
       args.x,
       {},
       args.y,
       args.rows},
      memory.moe);
}

// ---------------------------------------------------------------- norms, rotary, sampling

void CpuDevice::rmsnorm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows,
                        int64_t cols, float* y, int64_t y_stride, mr_stream) {
  cpu::norm_rows(context(), {{weight, eps}, x, x_stride, y, y_stride, rows, cols}, kNormedPerTask);
}

void CpuDevice::rotary_apply(const mr_rotary& rotary, const int32_t* positions, int64_t rows, int32_t heads,
                             int32_t head_dim, float* x, int64_t row_stride, mr_stream) {
  const cpu::Rotary by{
      {rotary.inv_freq, static_cast<size_t>(rotary.num_freqs)}, rotary.magnitude, rotary.interleaved != 0};
  cpu::rotary_rows(context(), by, positions, rows, heads, head_dim, x, row_stride);
}

size_t CpuDevice::sample_workspace_bytes(int64_t rows, int64_t vocab) const {
  if (rows == 0) return 0;
  cpu::Arena count(nullptr);
  cpu::take_draw_scratch(count, pool_.size(), vocab);
  return count.used();
}

void CpuDevice::sample(const float* logits, int64_t rows, int64_t vocab, const mr_sample_params* params,
                       int32_t* tokens, void* workspace, mr_stream) {
  cpu::Arena arena(bytes_at(workspace));
  const cpu::DrawScratch* scratch = cpu::take_draw_scratch(arena, pool_.size(), vocab);
  pool_.parallel_for(rows, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t r = begin; r < end; ++r) {
      const mr_sample_params& p = params[r];
      const bool draw = p.temperature >= kGreedyBelow && p.top_k != 1;
      tokens[r] = cpu::draw_token(
          logits + r * vocab, vocab,
          {draw, draw ? 1.0f / p.temperature : 1.0f, p.top_k, p.top_p, p.min_p, p.uniform}, scratch[thread]);
    }
  });
}

// ---------------------------------------------------------------- quantizing

void CpuDevice::quantize(DType type, const float* x, int64_t rows, int64_t cols, const float* importance,
                         std::byte* out) {
  if (!quant::can_encode(type)) {
    throw_error(ErrorCode::kUnsupported, "type is {}, which cannot be written", info(type).name);
  }
  const auto row_bytes = static_cast<int64_t>(bytes_of(type, cols));
  std::atomic<bool> finite{true};
  pool_.parallel_for(rows, kCodedPerTask, [&](int64_t begin, int64_t end, int) {
    if (!quant::all_finite(x + begin * cols, (end - begin) * cols)) finite = false;
  });
  if (!finite) throw_error(ErrorCode::kBadInput, "x has a NaN or an infinity, expected finite numbers");
  pool_.parallel_for(rows, kCodedPerTask, [&](int64_t begin, int64_t end, int) {
    quant::encode_rows(type, x + begin * cols, end - begin, cols, importance, out + begin * row_bytes);
  });
}

void CpuDevice::dequantize(const TensorView& matrix, int64_t first, int64_t rows, float* out) {
  const int64_t cols = matrix.cols();
  pool_.parallel_for(rows, kCodedPerTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) quant::dequantize_row(matrix, first + r, out + r * cols);
  });
}

}  // namespace millrace::api
