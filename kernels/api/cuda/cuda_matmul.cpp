// Dense products and experts of the C API on a GPU: GEMV for one to four rows, GEMM for more, the generic
// kernels for F32 and rows that are not whole blocks of 32. A row's bits are the same with GEMV and GEMM.
// Rows that do not lie as kernels read and write them go through the workspace.
#include <algorithm>

#include "kernels/api/cuda/cuda_device.h"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/gemm/generic.h"
#include "kernels/cuda/gemv/gemv.h"
#include "kernels/cuda/moe/moe.h"

namespace millrace::api::gpu {
namespace {

constexpr uintptr_t kVectorBytes = 16;  // that kernels load at once

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0; }

// [rows, cols] floats, `from` and `to` rows so many elements apart.
void copy_matrix(float* to, int64_t to_stride, const float* from, int64_t from_stride, int64_t rows,
                 int64_t cols, mr_stream stream) {
  const auto bytes = [](int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); };
  MILLRACE_CUDA_TRY(cudaMemcpy2DAsync(to, bytes(to_stride), from, bytes(from_stride), bytes(cols),
                                      static_cast<size_t>(rows), cudaMemcpyDeviceToDevice, stream));
}

// ---------------------------------------------------------------- dense

struct MatmulMemory {
  MatmulMemory(DeviceArena& arena, const CudaDeviceWeight& w, int64_t rows, const cuda::Device& device)
      : x(arena.take<float>(static_cast<size_t>(rows * w.cols))),
        y(arena.take<float>(static_cast<size_t>(rows * w.rows))),
        bf16_rows(arena.take<uint8_t>(w.is_packed() ? cuda::bf16_rows_bytes(rows, w.cols, device) : 0)) {}
  float *x, *y;  // where the caller's do not lie as kernels want them
  uint8_t* bf16_rows;
};

void multiply(const CudaDeviceWeight& w, const float* bias, const float* x, int64_t rows, bool add, float* y,
              uint8_t* bf16_rows, const cuda::Launch& at) {
  if (!w.is_packed()) return cuda::launch_linear(w.matrix, bias, x, rows, add, y, at);
  if (rows <= cuda::kMaxGemvRows && cuda::supports_gemv(w.packed, at.device, static_cast<int32_t>(rows))) {
    cuda::Gemv op;
    op.parts[op.num_parts++] = {w.packed, bias, y};
    op.x = x;
    op.tokens = static_cast<int32_t>(rows);
    op.add = add;
    return cuda::launch_gemv(op, at);
  }
  cuda::RoundRows round;
  round.x = x;
  round.rows = rows;
  round.cols = w.cols;
  round.weights = w.packed.format;
  round.to = {bf16_rows};
  cuda::launch_round_rows(round, at);
  cuda::Gemm op;
  op.parts[op.num_parts++] = {w.packed, bias, y};
  op.x = round.to;
  op.rows = rows;
  op.add = add;
  cuda::launch_gemm(op, at);
}

}  // namespace

size_t CudaDevice::matmul_workspace_bytes(const mr_weight& weight, int64_t rows) const {
  DeviceArena count(nullptr);
  const MatmulMemory memory(count, cuda_weight(&weight), rows, device_);
  return count.used();
}

void CudaDevice::matmul(const mr_matmul_args& args, void* workspace, mr_stream stream) {
  require_range(args.rows, 0, INT32_MAX, "args.rows");
  const cuda::Launch launch = at(stream);
  const CudaDeviceWeight& w = cuda_weight(args.weight);
  DeviceArena arena(workspace);
  const MatmulMemory memory(arena, w, args.rows, device_);
  const float* x = args.x;
  if (args.x_stride != w.cols || !is_aligned(x)) {
    copy_matrix(memory.x, w.cols, args.x, args.x_stride, args.rows, w.cols, stream);
    x = memory.x;
  }
  const bool direct = args.y_stride == w.rows && is_aligned(args.y);
  float* y = direct ? args.y : memory.y;
  if (!direct && args.accumulate != 0)
    copy_matrix(y, w.rows, args.y, args.y_stride, args.rows, w.rows, stream);
  multiply(w, args.bias, x, args.rows, args.accumulate != 0, y, memory.bf16_rows, launch);
  if (!direct) copy_matrix(args.y, args.y_stride, y, w.rows, args.rows, w.rows, stream);
}

// ---------------------------------------------------------------- experts

namespace {

struct MoeMemory {
  MoeMemory(DeviceArena& arena, const mr_moe_args& args, const cuda::Device& device) {
    const CudaDeviceWeight &gate = cuda_weight(args.gate), &down = cuda_weight(args.down);
    const int64_t pairs = args.rows * args.k;
    const auto experts = static_cast<int32_t>(gate.experts);
    const cuda::ExpertGroups sizes = cuda::expert_groups(nullptr, pairs, experts, device);
    const auto floats = [&](int64_t rows, int64_t cols) {
      return arena.take<float>(static_cast<size_t>(rows * cols));
    };
    x = floats(args.rows, gate.cols);
    y = floats(args.rows, gate.cols);
    act = floats(pairs, gate.rows);
    up = floats(pairs, gate.rows);
    out = floats(pairs, down.rows);
    groups = arena.take<int32_t>(cuda::expert_groups_ints(pairs, experts, device));
    bf16_rows =
        arena.take<uint8_t>(cuda::bf16_rows_bytes(sizes.max_rows, std::max(gate.cols, gate.rows), device));
  }
  float *x, *y;           // [rows, hidden]: where the caller's are not aligned
  float *act, *up, *out;  // [pairs, ffn] twice, [pairs, hidden]
  int32_t* groups;
  uint8_t* bf16_rows;
};

// One layer of experts, a launch after the other.
class MoeLaunch {
 public:
  MoeLaunch(const mr_moe_args& args, const MoeMemory& memory, const cuda::Launch& at)
      : args_(args),
        memory_(memory),
        at_(at),
        pairs_(args.rows * args.k),
        experts_(static_cast<int32_t>(args.gate->experts)),
        groups_(cuda::expert_groups(memory.groups, pairs_, experts_, at.device)) {}

  void run(const float* x, float* y) const {
    cuda::launch_group_experts(args_.chosen, pairs_, experts_, groups_, at_);
    const CudaDeviceWeight &gate = cuda_weight(args_.gate), &up = cuda_weight(args_.up);
    const cuda::Activation activation{args_.activation == MR_CLAMPED_SWIGLU, args_.alpha, args_.limit};
    if (gate.is_packed() && gate.packed.format == up.packed.format) {
      round_rows(x, args_.k, gate);
      cuda::GroupedGemm op = grouped(gate, args_.gate_bias, memory_.act);
      op.up = up.packed;
      op.up_bias = args_.up_bias;
      op.activation = activation;
      cuda::launch_grouped_gemm(op, at_);
    } else {
      multiply(gate, args_.gate_bias, x, args_.k, memory_.act);
      multiply(up, args_.up_bias, x, args_.k, memory_.up);
      cuda::launch_activate(activation, pairs_ * gate.rows, memory_.act, memory_.up, at_);
    }
    multiply(cuda_weight(args_.down), args_.down_bias, memory_.act, 1, memory_.out);
    cuda::launch_combine_experts(memory_.out, args_.weights, args_.rows, args_.k, args_.down->rows, y, at_);
  }

 private:
  // x [pairs / copies, cols] as bf16, in the groups' order.
  void round_rows(const float* x, int32_t copies, const CudaDeviceWeight& w) const {
    cuda::RoundRows round;
    round.x = x;
    round.sorted_rows = groups_.sorted_rows;
    round.copies = copies;
    round.rows = pairs_ / copies;
    round.cols = w.cols;
    round.weights = w.packed.format;
    round.to = {memory_.bf16_rows};
    cuda::launch_round_rows(round, at_);
  }
  cuda::GroupedGemm grouped(const CudaDeviceWeight& w, const float* bias, float* out) const {
    cuda::GroupedGemm op;
    op.gate = w.packed;
    op.experts = experts_;
    op.gate_bias = bias;
    op.groups = groups_;
    op.x = {memory_.bf16_rows};
    op.out = out;
    return op;
  }
  // out[pair, :] from the pair's expert and x[pair / copies, :].
  void multiply(const CudaDeviceWeight& w, const float* bias, const float* x, int32_t copies,
                float* out) const {
    if (!w.is_packed()) {
      return cuda::launch_expert_linear(w.matrix, bias, x, copies, args_.chosen, pairs_, out, at_);
    }
    round_rows(x, copies, w);
    cuda::launch_grouped_gemm(grouped(w, bias, out), at_);
  }

  const mr_moe_args& args_;
  const MoeMemory& memory_;
  const cuda::Launch at_;
  const int64_t pairs_;
  const int32_t experts_;
  const cuda::ExpertGroups groups_;
};

}  // namespace

size_t CudaDevice::moe_workspace_bytes(const mr_moe_args& args) const {
  DeviceArena count(nullptr);
  const MoeMemory memory(count, args, device_);
  return count.used();
}

void CudaDevice::moe(const mr_moe_args& args, void* workspace, mr_stream stream) {
  const cuda::Launch launch = at(stream);
  DeviceArena arena(workspace);
  const MoeMemory memory(arena, args, device_);
  const int64_t hidden = args.gate->cols;
  const float* x = args.x;
  if (!is_aligned(x)) {
    copy_matrix(memory.x, hidden, args.x, hidden, args.rows, hidden, stream);
    x = memory.x;
  }
  const bool direct = is_aligned(args.y);
  float* y = direct ? args.y : memory.y;
  if (!direct) copy_matrix(y, hidden, args.y, hidden, args.rows, hidden, stream);
  MoeLaunch(args, memory, launch).run(x, y);
  if (!direct) copy_matrix(args.y, hidden, y, hidden, args.rows, hidden, stream);
}

}  // namespace millrace::api::gpu
