#include "backend/mixed/mixed_weight.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/error.h"

namespace millrace::mixed {

Norm on(Norm op, Side side) {
  op.weight = part_of(op.weight, side);
  op.bias = part_of(op.bias, side);
  return op;
}

Linear on(Linear op, Side side) { return {part_of(op.weight, side), part_of(op.bias, side)}; }

Embed on(Embed op, Side side) {
  op.table = part_of(op.table, side);
  op.positions = part_of(op.positions, side);
  op.types = part_of(op.types, side);
  op.norm = on(op.norm, side);
  return op;
}

NormQkv on(NormQkv op, Side side) {
  for (Norm* norm : {&op.norm, &op.q_norm, &op.k_norm, &op.v_norm}) *norm = on(*norm, side);
  for (Linear* linear : {&op.q, &op.k, &op.v}) *linear = on(*linear, side);
  return op;
}

NormLatentQkv on(NormLatentQkv op, Side side) {
  for (Norm* norm : {&op.norm, &op.q_a_norm, &op.kv_a_norm, &op.index_k_norm}) *norm = on(*norm, side);
  for (Linear* linear : {&op.q_a, &op.q, &op.kv_a, &op.k_b, &op.index_q, &op.index_k, &op.index_weights}) {
    *linear = on(*linear, side);
  }
  return op;
}

Attend on(Attend op, Side side) {
  op.sinks = part_of(op.sinks, side);
  return op;
}

NormMix on(NormMix op, Side side) {
  op.norm = on(op.norm, side);
  for (Linear& in : op.in) in = on(in, side);
  for (NormMix::Behind& behind : op.behind) behind.by = on(behind.by, side);
  return op;
}

StateMix on(StateMix op, Side side) {
  for (const Weight** weight :
       {&op.conv, &op.conv_bias, &op.conv_keys, &op.conv_values, &op.a, &op.step_bias, &op.d}) {
    *weight = part_of(*weight, side);
  }
  op.norm = on(op.norm, side);
  return op;
}

Projection on(Projection op, Side side) {
  op.linear = on(op.linear, side);
  op.head_values = on(op.head_values, side);
  op.norm_after = on(op.norm_after, side);
  return op;
}

Ffn on(Ffn op, Side side) {
  op.norm = on(op.norm, side);
  for (Linear* linear : {&op.gate, &op.up, &op.down}) *linear = on(*linear, side);
  op.norm_after = on(op.norm_after, side);
  return op;
}

Route on(Route op, Side side) {
  op.norm = on(op.norm, side);
  op.router = on(op.router, side);
  op.choice_bias = part_of(op.choice_bias, side);
  return op;
}

Experts on(Experts op, Side side) {
  for (Linear* linear : {&op.gate, &op.up, &op.down}) *linear = on(*linear, side);
  Experts::Shared& shared = op.shared;
  for (Linear* linear : {&shared.gate, &shared.up, &shared.down, &shared.mix}) *linear = on(*linear, side);
  return op;
}

Logits on(Logits op, Side side) {
  op.norm = on(op.norm, side);
  op.output = on(op.output, side);
  return op;
}

namespace {

// Rows of the data from one expert to the next.
int64_t rows_apart(const TensorView& view) {
  if (view.rank < 3) return 1;
  return view.matrix_rows == 0 ? view.shape[1] : view.matrix_rows;
}

}  // namespace

TensorView experts_shape(const TensorView& view, int64_t count) {
  TensorView out = view;
  out.shape[0] = count;
  return out;
}

TensorView experts_view(const TensorView& view, const std::vector<int32_t>& ids,
                        std::vector<std::unique_ptr<std::byte[]>>& owned) {
  MILLRACE_CHECK(view.rank >= 2 && !ids.empty() && ids.back() < view.shape[0]);
  TensorView out = experts_shape(view, std::ssize(ids));
  const int64_t apart = rows_apart(view);
  if (ids.back() - ids.front() + 1 == std::ssize(ids)) {
    const int64_t first = ids.front() * apart;
    out.data = view.data + first * view.row_stride_bytes;
    if (view.scales.data == nullptr) return out;
    if (view.scales.rows_per_scale == 1) {
      const auto scale_bytes = static_cast<int64_t>(info(view.scales.type).block_bytes);
      out.scales.data = view.scales.data + first * view.scales.scales_per_row * scale_bytes;
    } else {
      out.scales.first_row = view.scales.first_row + first;
    }
    return out;
  }
  if (view.scales.data != nullptr && view.scales.rows_per_scale != 1) {
    throw_error(
        ErrorCode::kUnsupported,
        "{}: experts with a grid of scales beside them are placed in one piece, expected experts that "
        "follow one another",
        view.name);
  }
  const int64_t rows = view.rows() / view.shape[0];
  // `bytes` of every row of these experts, rows `stride` apart.
  const auto gather = [&](const std::byte* from, int64_t stride, int64_t bytes) {
    owned.push_back(std::unique_ptr<std::byte[]>(new std::byte[static_cast<size_t>(out.rows() * bytes)]));
    std::byte* to = owned.back().get();
    for (const int32_t e : ids) {
      for (int64_t r = 0; r < rows; ++r, to += bytes) {
        std::memcpy(to, from + (e * apart + r) * stride, static_cast<size_t>(bytes));
      }
    }
    return owned.back().get();
  };
  const auto row_bytes = static_cast<int64_t>(bytes_of(view.type, view.cols()));
  out.data = gather(view.data, view.row_stride_bytes, row_bytes);
  if (const ScaleGrid& scales = view.scales; scales.data != nullptr) {
    const auto scale_bytes = static_cast<int64_t>(info(scales.type).block_bytes);
    out.scales.scales_per_row = view.cols() / scales.cols_per_scale;
    out.scales.data =
        gather(scales.data, scales.scales_per_row * scale_bytes, out.scales.scales_per_row * scale_bytes);
    out.scales.first_row = 0;
  }
  out.row_stride_bytes = row_bytes;
  out.matrix_rows = 0;
  return out;
}

}  // namespace millrace::mixed
