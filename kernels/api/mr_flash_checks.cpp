#include "kernels/api/mr_flash_checks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>

#include "kernels/api/mr_status.h"

namespace millrace::api {
namespace {

constexpr int32_t kMaxFlashDim = 256, kFlashDimStep = 8, kPageStep = 16, kRowBytesStep = 16;

size_t flash_element_bytes(mr_dtype type) { return type == MR_F32 ? 4 : type == MR_F8_E4M3 ? 1 : 2; }

void check_finite(float x, const char* name) {
  if (!std::isfinite(x)) flash_bad(fmt::format("{} is {}, expected a finite number", name, x));
}

void check_sizes(const mr_flash_problem& p) {
  if (p.type != MR_F32 && p.type != MR_F16 && p.type != MR_BF16 && p.type != MR_F8_E4M3) {
    throw_error(ErrorCode::kUnsupported, "problem.type is {}, expected bf16, f16, f32 or f8_e4m3",
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

// A name is put together where something is wrong alone: that takes longer than the call of a small tensor.
void check_stride(int64_t stride, int64_t count, const TensorShape& shape, const char* tensor,
                  const char* member) {
  if (count <= 1) return;
  const bool in_range = stride >= shape.dim && stride <= kMaxElements;
  if (in_range && stride * static_cast<int64_t>(flash_element_bytes(shape.type)) % kRowBytesStep == 0) return;
  const std::string name = fmt::format("{}.{}", tensor, member);
  require_range(stride, shape.dim, kMaxElements, name.c_str());
  flash_bad(fmt::format("{} is {} elements, expected a multiple of {} bytes", name, stride, kRowBytesStep));
}

// Rows of an output may interleave in any order, but none may share an element. How many rows all ragged
// sequences have stands in the device's memory: a head's stride is not compared with them.
void check_apart(const mr_flash_tensor& t, const TensorShape& shape, const char* name) {
  struct Side {
    int64_t stride, count;
  };
  std::array<Side, 3> sides{
      {{t.batch_stride, shape.batch}, {t.seq_stride, shape.seq}, {t.head_stride, shape.heads}}};
  std::sort(sides.begin(), sides.end(), [](const Side& a, const Side& b) { return a.stride < b.stride; });
  int64_t extent = shape.dim;
  for (const Side& side : sides) {
    const bool unknown = shape.ragged && side.stride == t.seq_stride && side.stride < t.head_stride;
    if (side.count <= 1 || unknown) continue;
    if (side.stride < extent) {
      flash_bad(
          fmt::format("{}: rows overlap, a stride of {} steps over {} elements", name, side.stride, extent));
    }
    extent += product(side.count - 1, side.stride, name);
  }
}

}  // namespace

void flash_bad(const std::string& line) { throw_error(ErrorCode::kBadInput, "{}", line); }

mr_dtype flash_out_type(const mr_flash_problem& p) { return p.type == MR_F8_E4M3 ? MR_BF16 : p.type; }

void check_dim(int32_t dim, const char* name) {
  if (dim < kFlashDimStep || dim > kMaxFlashDim || dim % kFlashDimStep != 0) {
    throw_error(ErrorCode::kUnsupported, "{} is {}, expected a multiple of {} from {} to {}", name, dim,
                kFlashDimStep, kFlashDimStep, kMaxFlashDim);
  }
}

void check_words(const void* pointer, const char* name) {
  if (pointer != nullptr) require_aligned(pointer, 4, name);
}

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
                "problem.type is f8_e4m3, which has no backward: expected bf16, f16 or f32");
  }
  if (p.pages != nullptr) {
    throw_error(ErrorCode::kUnsupported,
                "problem.pages is set, which has no backward: expected NULL, and cu_k for ragged keys");
  }
  return p;
}

void check_flash_tensor(const mr_flash_tensor& t, const TensorShape& shape, const char* name) {
  if (shape.batch == 0 || shape.seq == 0) return;
  if (t.data == nullptr || reinterpret_cast<uintptr_t>(t.data) % kRowBytesStep != 0)
    require_aligned(t.data, kRowBytesStep, fmt::format("{}.data", name).c_str());
  check_stride(t.batch_stride, shape.batch, shape, name, "batch_stride");
  check_stride(t.seq_stride, shape.seq, shape, name, "seq_stride");
  check_stride(t.head_stride, shape.heads, shape, name, "head_stride");
  if (shape.written) check_apart(t, shape, name);
}

TensorShape query_shape(const mr_flash_problem& p, int32_t dim, mr_dtype type, bool written) {
  if (p.cu_q == nullptr) return {p.batch, p.max_q, p.heads, dim, type, written};
  return {std::min(p.batch, 1), int64_t{p.batch} * p.max_q, p.heads, dim, type, written, true};
}
TensorShape key_shape(const mr_flash_problem& p, int32_t dim, mr_dtype type, bool written) {
  if (p.pages != nullptr) {
    const int64_t pages = p.max_k == 0 ? 0 : 2;  // as many as the pool has: a stride is needed
    return {p.batch == 0 ? 0 : pages, p.page_tokens, p.kv_heads, dim, type, written};
  }
  if (p.cu_k == nullptr) return {p.batch, p.max_k, p.kv_heads, dim, type, written};
  return {std::min(p.batch, 1), int64_t{p.batch} * p.max_k, p.kv_heads, dim, type, written, true};
}

void check_inputs(const mr_flash_problem& p, const mr_flash_tensor& q, const mr_flash_tensor& k,
                  const mr_flash_tensor& v, const mr_flash_tensor& out, bool out_written) {
  check_flash_tensor(q, query_shape(p, p.head_dim, p.type, false), "q");
  check_flash_tensor(k, key_shape(p, p.head_dim, p.type, false), "k");
  check_flash_tensor(v, key_shape(p, p.value_dim, p.type, false), "v");
  check_flash_tensor(out, query_shape(p, p.value_dim, flash_out_type(p), out_written), "out");
}

}  // namespace millrace::api
