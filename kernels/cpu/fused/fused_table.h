// The fused kernels of this translation unit's instruction set.
#pragma once

#include "kernels/cpu/fused/activation_rows.h"
#include "kernels/cpu/fused/norm_rows.h"
#include "kernels/cpu/fused/rotary_rows.h"
#include "kernels/cpu/fused/softmax_rows.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

constexpr FusedKernels make_fused_kernels() {
  FusedKernels table{};
  table.norm = norm_fused_row;
  table.norm_backward = norm_backward_row;
  table.activation = activation_row;
  table.activation_backward = activation_backward_row;
  table.row_sum = sum_of_exp_row;
  table.softmax = softmax_row;
  table.softmax_backward = softmax_backward_row;
  table.scale = scale_row;
  table.sum_rows = sum_rows_row;
  table.rotary_angles = rotary_angles_row;
  table.rotate = rotate_row;
  table.dropout = dropout_row;
  return table;
}

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
