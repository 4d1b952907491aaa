// The C functions of millrace/kernels/flash_attention.h: what is checked on every device, before anything is
// launched or written.
#include "millrace/kernels/flash_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "kernels/api/mr_device.h"

namespace millrace::api {
namespace {

constexpr int32_t kMaxFlashHeads = 1 << 16, kMaxFlashBatch = 1 << 20, kMaxFlashLength = 1 << 30;
constexpr int32_t kMaxFlashDim = 256, kFlashDimStep = 8, kPageStep = 16, kRowBytesStep = 16;
constexpr int32_t kKeysPerScale = 128;

[[noreturn]] void flash_bad(const std::string& line) { throw_error(ErrorCode::kBadInput, "{}", line); }

size_t flash_element_bytes(mr_dtype type) { return type == MR_F32 ? 4 : type == MR_F8_E4M3 ? 1 : 2; }

mr_dtype out_type(const mr_flash_problem& p) { return p.type == MR_F8_E4M3 ? MR_BF16 : p.type; }

void check_dim(int32_t dim, const char* name) {
  if (dim < kFlashDimStep || dim > kMaxFlashDim || dim % kFlashDimStep != 0) {
    throw_error(ErrorCode::kUnsupported, "{} is {}, expected a multiple of {} from {} to {}", name, dim,
                kFlashDimStep, kFlashDimStep, kMaxFlashDim);
  }
}

void check_finite(float x, const char* name) {
  if (!std::isfinite(x)) flash_bad(fmt::format("{} is {}, expected a finite number", name, x));
}

// An array that may be absent.
void check_words(const void* pointer, const char* name) {
  if (pointer != nullptr) require_aligned(pointer, 4, name);
}

void check_sizes(const mr_flash_problem& p) {
  if (p.type != MR_F32 && p.type != MR_F16 && p.type != MR_BF16 && p.type != MR_F8_E4M3) {
    throw_error(ErrorCode::kUnsupported, "problem.type is {}, expected bf16, f16, f8_e4m3 or, on a CPU, f32",
                mr_dtype_name(p.type));
  }
  require_range(p.batch, 0, kMaxFlashBatch, "problem.batch");
  require_range(p.heads, 1, kMaxFlashHeads, "problem.heads");
  require_range(p.kv_heads, 1, p.heads, "problem.kv_heads");
  if (p.heads % p.kv_heads != 0) {
    flash_bad(
        fmt::format("problem.heads is {}, expected a multiple of the {} kv_heads", p.heads, p.kv_heads));
  }
  check_dim(p.head_dim, "problem.head_dim");
  check_dim(p.value_dim, "problem.value_dim");
  require_range(p.max_q, 0, kMaxFlashLength, "problem.max_q");
  require_range(p.max_k, 0, kMaxFlashLength, "problem.max_k");
  const int64_t rows = product(p.batch, std::max(p.max_q, p.max_k), "rows of the problem");
  product(rows, int64_t{p.heads} * std::max(p.head_dim, p.value_dim), "elements of the problem");
  check_finite(p.scale, "problem.scale");
  check_finite(p.softcap, "problem.softcap");
  if (p.softcap < 0.0f) flash_bad(fmt::format("problem.softcap is {}, expected 0 or more", p.softcap));
  check_words(p.sinks, "problem.sinks");
}

void check_layout(const mr_flash_problem& p) {
  check_words(p.cu_q, "problem.cu_q");
  check_words(p.cu_k, "problem.cu_k");
  if (p.pages == nullptr) {
    if (p.k_lengths != nullptr) flash_bad("problem.k_lengths is set, expected NULL where pages is NULL");
    if ((p.cu_q == nullptr) != (p.cu_k == nullptr)) {
      flash_bad(fmt::format("problem.{} is NULL and the other is not, expected cu_q and cu_k or neither",
                            p.cu_q == nullptr ? "cu_q" : "cu_k"));
    }
    return;
  }
  check_words(p.pages, "problem.pages");
  require_aligned(p.k_lengths, 4, "problem.k_lengths");
  if (p.page_tokens < kPageStep || p.page_tokens % kPageStep != 0) {
    flash_bad(fmt::format("problem.page_tokens is {}, expected a multiple of {}", p.page_tokens, kPageStep));
  }
  const int64_t pages = (int64_t{p.max_k} + p.page_tokens - 1) / p.page_tokens;
  require_range(p.pages_stride, p.batch > 1 ? pages : 0, kMaxElements, "problem.pages_stride");
}

void check_blocks(const mr_flash_problem& p) {
  if (p.blocks == nullptr) return;
  const mr_flash_blocks& b = *p.blocks;
  const auto check_side = [](int32_t side, const char* name) {
    if (side != 64 && side != 128) {
      throw_error(ErrorCode::kUnsupported, "{} is {}, expected 64 or 128", name, side);
    }
  };
  check_side(b.block_q, "blocks.block_q");
  check_side(b.block_k, "blocks.block_k");
  const int32_t q_blocks = (p.max_q + b.block_q - 1) / b.block_q;
  require_range(b.q_blocks, q_blocks, q_blocks, "blocks.q_blocks");
  require_aligned(b.row_starts, 4, "blocks.row_starts");
  require_aligned(b.columns, 4, "blocks.columns");
}

void check_flash_scales(const mr_flash_problem& p) {
  struct Named {
    const float* scales;
    int32_t rows;
    const char* name;
  };
  for (const Named& of :
       {Named{p.q_scales, p.max_q, "problem.q_scales"}, Named{p.k_scales, p.max_k, "problem.k_scales"},
        Named{p.v_scales, p.max_k, "problem.v_scales"}}) {
    if (p.type == MR_F8_E4M3) {
      if (p.batch > 0 && of.rows > 0) require_aligned(of.scales, 4, of.name);
    } else if (of.scales != nullptr) {
      flash_bad(fmt::format("{} is set, expected NULL for type {}", of.name, mr_dtype_name(p.type)));
    }
  }
}

// Checked, with the scale that 0 stands for.
mr_flash_problem checked_problem(const mr_flash_problem* problem) {
  require_pointer(problem, "problem");
  mr_flash_problem p = *problem;
  check_sizes(p);
  check_layout(p);
  check_blocks(p);
  check_flash_scales(p);
  if (p.scale == 0.0f) p.scale = 1.0f / std::sqrt(static_cast<float>(p.head_dim));
  return p;
}

mr_flash_problem checked_for_backward(const mr_flash_problem* problem) {
  const mr_flash_problem p = checked_problem(problem);
  if (p.type == MR_F8_E4M3) {
    throw_error(ErrorCode::kUnsupported,
                "problem.type is f8_e4m3, which has no backward: expected bf16, f16 or, on a CPU, f32");
  }
  if (p.pages != nullptr) {
    throw_error(ErrorCode::kUnsupported,
                "problem.pages is set, which has no backward: expected NULL, and cu_k for ragged keys");
  }
  return p;
}

// How many of what a tensor's strides step over; a count of 0 or 1 leaves its stride unread.
struct TensorShape {
  int64_t batch, seq, heads, dim;
  mr_dtype type;
  bool written;
};

void check_stride(int64_t stride, int64_t count, const TensorShape& shape, const std::string& name) {
  if (count <= 1) return;
  require_range(stride, shape.dim, kMaxElements, name.c_str());
  if (stride * static_cast<int64_t>(flash_element_bytes(shape.type)) % kRowBytesStep != 0) {
    flash_bad(fmt::format("{} is {} elements, expected a multiple of {} bytes", name, stride, kRowBytesStep));
  }
}

// Rows of an output may interleave in any order, but none may share an element.
void check_apart(const mr_flash_tensor& t, const TensorShape& shape, const char* name) {
  struct Side {
    int64_t stride, count;
  };
  std::array<Side, 3> sides{
      {{t.batch_stride, shape.batch}, {t.seq_stride, shape.seq}, {t.head_stride, shape.heads}}};
  std::sort(sides.begin(), sides.end(), [](const Side& a, const Side& b) { return a.stride < b.stride; });
  int64_t extent = shape.dim;
  for (const Side& side : sides) {
    if (side.count <= 1) continue;
    if (side.stride < extent) {
      flash_bad(
          fmt::format("{}: rows overlap, a stride of {} steps over {} elements", name, side.stride, extent));
    }
    extent += product(side.count - 1, side.stride, name);
  }
}

void check_flash_tensor(const mr_flash_tensor& t, const TensorShape& shape, const char* name) {
  if (shape.batch == 0 || shape.seq == 0) return;
  require_aligned(t.data, kRowBytesStep, fmt::format("{}.data", name).c_str());
  check_stride(t.batch_stride, shape.batch, shape, fmt::format("{}.batch_stride", name));
  check_stride(t.seq_stride, shape.seq, shape, fmt::format("{}.seq_stride", name));
  check_stride(t.head_stride, shape.heads, shape, fmt::format("{}.head_stride", name));
  if (shape.written) check_apart(t, shape, name);
}

// Of q, out and their gradients; of k, v and theirs.
TensorShape query_shape(const mr_flash_problem& p, int32_t dim, mr_dtype type, bool written) {
  if (p.cu_q == nullptr) return {p.batch, p.max_q, p.heads, dim, type, written};
  return {std::min(p.batch, 1), int64_t{p.batch} * p.max_q, p.heads, dim, type, written};
}
TensorShape key_shape(const mr_flash_problem& p, int32_t dim, bool written) {
  if (p.pages != nullptr) {
    const int64_t pages = p.max_k == 0 ? 0 : 2;  // as many as the pool has: a stride is needed
    return {p.batch == 0 ? 0 : pages, p.page_tokens, p.kv_heads, dim, p.type, written};
  }
  if (p.cu_k == nullptr) return {p.batch, p.max_k, p.kv_heads, dim, p.type, written};
  return {std::min(p.batch, 1), int64_t{p.batch} * p.max_k, p.kv_heads, dim, p.type, written};
}

void check_inputs(const mr_flash_problem& p, const mr_flash_tensor& q, const mr_flash_tensor& k,
                  const mr_flash_tensor& v, const mr_flash_tensor& out, bool out_written) {
  check_flash_tensor(q, query_shape(p, p.head_dim, p.type, false), "q");
  check_flash_tensor(k, key_shape(p, p.head_dim, false), "k");
  check_flash_tensor(v, key_shape(p, p.value_dim, false), "v");
  check_flash_tensor(out, query_shape(p, p.value_dim, out_type(p), out_written), "out");
}

void check_gradients(const mr_flash_problem& p, const mr_flash_gradients& g) {
  require_range(g.deterministic, 0, 1, "gradients.deterministic");
  check_flash_tensor(g.d_out, query_shape(p, p.value_dim, p.type, false), "gradients.d_out");
  check_flash_tensor(g.d_q, query_shape(p, p.head_dim, p.type, true), "gradients.d_q");
  check_flash_tensor(g.d_k, key_shape(p, p.head_dim, true), "gradients.d_k");
  check_flash_tensor(g.d_v, key_shape(p, p.value_dim, true), "gradients.d_v");
  check_words(g.d_sinks, "gradients.d_sinks");
  if (g.d_sinks != nullptr && p.sinks == nullptr) {
    flash_bad("gradients.d_sinks is set, expected NULL where problem.sinks is NULL");
  }
}

mr_flash_quantize_args checked_quantize(const mr_flash_quantize_args* args) {
  require_pointer(args, "args");
  if (args->type != MR_BF16 && args->type != MR_F16) {
    throw_error(ErrorCode::kUnsupported, "args.type is {}, expected bf16 or f16", mr_dtype_name(args->type));
  }
  require_range(args->batch, 0, kMaxFlashBatch, "args.batch");
  require_range(args->seq, 0, kMaxFlashLength, "args.seq");
  require_range(args->heads, 1, kMaxFlashHeads, "args.heads");
  check_dim(args->dim, "args.dim");
  if (args->rows_per_scale != 1 && args->rows_per_scale != kKeysPerScale) {
    flash_bad(fmt::format("args.rows_per_scale is {}, expected 1 (q) or {} (k, v)", args->rows_per_scale,
                          kKeysPerScale));
  }
  require_range(args->rotate, 0, 1, "args.rotate");
  check_flash_tensor(args->x, {args->batch, args->seq, args->heads, args->dim, args->type, false}, "args.x");
  check_flash_tensor(args->codes, {args->batch, args->seq, args->heads, args->dim, MR_F8_E4M3, true},
                     "args.codes");
  if (args->batch > 0 && args->seq > 0) require_aligned(args->scales, 4, "args.scales");
  return *args;
}

}  // namespace
}  // namespace millrace::api

namespace api = millrace::api;

extern "C" {

mr_status mr_flash_forward_workspace_bytes(const mr_device* device, const mr_flash_problem* problem,
                                           size_t* bytes) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::require_pointer(bytes, "bytes");
    *bytes = device->flash_forward_workspace_bytes(api::checked_problem(problem));
  });
}

mr_status mr_flash_forward(mr_device* device, const mr_flash_problem* problem, mr_flash_tensor q,
                           mr_flash_tensor k, mr_flash_tensor v, mr_flash_tensor out, float* lse,
                           void* workspace, size_t workspace_bytes, mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    const mr_flash_problem p = api::checked_problem(problem);
    api::check_inputs(p, q, k, v, out, true);
    api::check_words(lse, "lse");
    api::require_workspace(workspace, workspace_bytes, device->flash_forward_workspace_bytes(p));
    device->flash_forward({p, q, k, v, out, lse, workspace, workspace_bytes, stream});
  });
}

mr_status mr_flash_backward_workspace_bytes(const mr_device* device, const mr_flash_problem* problem,
                                            int32_t deterministic, size_t* bytes) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    api::require_pointer(bytes, "bytes");
    api::require_range(deterministic, 0, 1, "deterministic");
    *bytes = device->flash_backward_workspace_bytes(api::checked_for_backward(problem), deterministic != 0);
  });
}

mr_status mr_flash_backward(mr_device* device, const mr_flash_problem* problem, mr_flash_tensor q,
                            mr_flash_tensor k, mr_flash_tensor v, mr_flash_tensor out, const float* lse,
                            const mr_flash_gradients* gradients, void* workspace, size_t workspace_bytes,
                            mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    const mr_flash_problem p = api::checked_for_backward(problem);
    api::require_pointer(gradients, "gradients");
    api::check_inputs(p, q, k, v, out, false);
    api::check_gradients(p, *gradients);
    if (p.batch > 0 && p.max_q > 0) api::require_aligned(lse, 4, "lse");
    api::require_workspace(workspace, workspace_bytes,
                           device->flash_backward_workspace_bytes(p, gradients->deterministic != 0));
    device->flash_backward({p, q, k, v, out, lse, *gradients, workspace, workspace_bytes, stream});
  });
}

mr_status mr_flash_quantize(mr_device* device, const mr_flash_quantize_args* args, mr_stream stream) {
  return api::guarded([&] {
    api::require_pointer(device, "device");
    device->flash_quantize(api::checked_quantize(args), stream);
  });
}

}  // extern "C"
