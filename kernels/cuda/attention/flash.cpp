// Attention over tensors on a GPU: which problems have kernels, how large workspaces are, and who is called.
#include "kernels/cuda/attention/flash.h"

#include "kernels/cuda/attention/flash_backward_call.h"
#include "kernels/cuda/attention/flash_forward_call.h"
#include "kernels/cuda/resources.h"

namespace millrace::cuda {
namespace {

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

// A workspace, one part behind the other; with a null base it counts.
struct WorkspaceParts {
  size_t bytes = 0;

 protected:
  // Null where there is nothing of it.
  template <class T>
  T* take(void* base, size_t count) {
    T* at =
        count == 0 || base == nullptr ? nullptr : reinterpret_cast<T*>(static_cast<uint8_t*>(base) + bytes);
    bytes += aligned(count * sizeof(T));
    return at;
  }
};

struct ForwardMemory : WorkspaceParts {
  int32_t *counter, *tile_starts;
  int32_t splits = 1;
  float *partial = nullptr, *partial_lse = nullptr;
  uint8_t* value_tiles = nullptr;

  ForwardMemory(const mr_flash_problem& p, void* base) {
    counter = take<int32_t>(base, 1);
    tile_starts = take<int32_t>(base, p.cu_q != nullptr ? static_cast<size_t>(p.batch) + 1 : 0);
    if (p.type == MR_F8_E4M3) value_tiles = take<uint8_t>(base, flash_value_tiles_bytes(p));
    if (p.blocks != nullptr || !flash_is_decode(p) || p.max_k <= kFlashSplitKeys) return;
    splits = (p.max_k + kFlashSplitKeys - 1) / kFlashSplitKeys;
    const size_t rows = static_cast<size_t>(p.batch) * static_cast<size_t>(p.heads) *
                        static_cast<size_t>(p.max_q) * static_cast<size_t>(splits);
    partial = take<float>(base, rows * static_cast<size_t>(p.value_dim));
    partial_lse = take<float>(base, rows);
  }
};

struct BackwardMemory : WorkspaceParts {
  int32_t *counter, *tile_starts, *turns;
  float *lse_log2, *delta, *dq, *bounds, *column_factors;
  int8_t* row_exponents;

  BackwardMemory(const mr_flash_problem& p, bool deterministic, void* base) {
    const auto heads = static_cast<size_t>(p.batch) * static_cast<size_t>(p.heads);
    const auto queries = static_cast<size_t>(flash_backward_queries(p));
    const size_t tiles = heads * ((static_cast<size_t>(p.max_q) + queries - 1) / queries),
                 rows = tiles * queries;
    counter = take<int32_t>(base, 1);
    tile_starts = take<int32_t>(base, p.cu_k != nullptr ? static_cast<size_t>(p.batch) + 1 : 0);
    const bool fixed_point = deterministic && p.blocks != nullptr;
    turns = take<int32_t>(base, deterministic && !fixed_point ? tiles : 0);
    lse_log2 = take<float>(base, rows);
    delta = take<float>(base, rows);
    const auto dim = static_cast<size_t>(flash_backward_dim(p));
    dq = take<float>(base, rows * dim);
    const size_t kv_heads = fixed_point ? static_cast<size_t>(p.batch) * static_cast<size_t>(p.kv_heads) : 0;
    bounds = take<float>(base, kv_heads * (dim + 1));
    row_exponents = take<int8_t>(base, fixed_point ? rows : 0);
    column_factors = take<float>(base, kv_heads * dim);
  }
};

}  // namespace

const char* flash_forward_lacks(const mr_flash_problem& problem, const Device& device) {
  if (!device.has_wgmma()) return "this GPU or build has no kernel; one with sm_90a (H100, H200) has";
  if (problem.type == MR_F8_E4M3) {
    if (problem.blocks != nullptr || problem.head_dim > 128 || problem.value_dim > 128) {
      return "no kernel for block-sparse calls or these head sizes of f8_e4m3; multiples of 8 up to 128 have "
             "one";
    }
    return nullptr;
  }
  if (problem.type != MR_BF16 && problem.type != MR_F16) {
    return "no kernel for this type on this GPU; sm_80 and later have f32, bf16 and f8_e4m3, sm_75 f16";
  }
  if (problem.head_dim % 8 != 0 || problem.value_dim % 8 != 0 || problem.head_dim > 256 ||
      problem.value_dim > 256) {
    return "no kernel for these head sizes; multiples of 8 up to 256 have one";
  }
  if (problem.blocks != nullptr && (problem.head_dim > 128 || problem.value_dim > 128)) {
    return "no kernel for block-sparse calls with these head sizes; multiples of 8 up to 128 have one";
  }
  if (problem.blocks != nullptr && problem.pages != nullptr) {
    return "no kernel for block-sparse calls with pages; blocks NULL or pages NULL has one";
  }
  return nullptr;
}

size_t flash_forward_workspace(const mr_flash_problem& problem, const Device&) {
  return ForwardMemory(problem, nullptr).bytes;
}

void launch_flash_forward(const mr_flash_problem& problem, const mr_flash_tensor& q, const mr_flash_tensor& k,
                          const mr_flash_tensor& v, const mr_flash_tensor& out, float* lse, void* workspace,
                          const Launch& at) {
  if (problem.batch == 0 || problem.heads == 0 || problem.max_q == 0) return;
  const ForwardMemory memory(problem, workspace);
  const FlashForwardCall call{problem,
                              q,
                              k,
                              v,
                              out,
                              lse,
                              memory.counter,
                              memory.tile_starts,
                              memory.splits,
                              memory.partial,
                              memory.partial_lse,
                              memory.value_tiles};
  if (problem.type == MR_F8_E4M3) return launch_flash_forward_e4m3(call, at);
  problem.type == MR_BF16 ? launch_flash_forward_bf16(call, at) : launch_flash_forward_f16(call, at);
}

const char* flash_backward_lacks(const mr_flash_problem& problem, const Device& device) {
  if (!device.has_wgmma()) return "this GPU or build has no kernel; one with sm_90a (H100, H200) has";
  if (problem.type != MR_BF16 && problem.type != MR_F16)
    return "no backward kernel for this type; bf16, f16 and f32 have one";
  if (problem.head_dim > 128 || problem.value_dim > 128 || problem.head_dim % 8 != 0 ||
      problem.value_dim % 8 != 0) {
    return "no backward kernel for these head sizes; multiples of 8 up to 128 have one";
  }
  return nullptr;
}

size_t flash_backward_workspace(const mr_flash_problem& problem, bool deterministic, const Device&) {
  return BackwardMemory(problem, deterministic, nullptr).bytes;
}

void launch_flash_backward(const mr_flash_problem& problem, const mr_flash_tensor& q,
                           const mr_flash_tensor& k, const mr_flash_tensor& v, const mr_flash_tensor& out,
                           const float* lse, const mr_flash_gradients& gradients, void* workspace,
                           const Launch& at) {
  if (problem.batch == 0 || problem.heads == 0) return;
  const BackwardMemory memory(problem, gradients.deterministic != 0, workspace);
  const FlashBackwardCall call{problem,
                               q,
                               k,
                               v,
                               out,
                               lse,
                               gradients,
                               memory.counter,
                               memory.tile_starts,
                               memory.turns,
                               memory.lse_log2,
                               memory.delta,
                               memory.dq,
                               memory.bounds,
                               memory.row_exponents,
                               memory.column_factors};
  problem.type == MR_BF16 ? launch_flash_backward_bf16(call, at) : launch_flash_backward_f16(call, at);
}

}  // namespace millrace::cuda
