// Where the operands of a block-scaled product of e2m1 matrices, m16n8k64 of sm_120a, are found in rows of
// codes and scales. Host and device: the kernel loads by these, and a test on the host puts what they load
// through an emulation of the instruction.
//
// Lane (g, t) = (lane / 4, lane % 4). A register is eight codes, four bytes of a row. Scales of 64 columns
// are one word, the first block's in the lowest byte: four of NVFP4, two of MXFP4. The instruction looks at
// lanes t = 0 and 1 for a's (rows g and g + 8) and at t = 0 for b's; the others' are the same.
#pragma once

#include <cstdint>

#include "kernels/quant/e2m1_word.h"

namespace millrace::quant {

inline constexpr int kFp4StepColumns = 64, kFp4StepBytes = kFp4StepColumns / 2;

struct Fp4Word {
  int row, byte;  // of the 16 (a) or 8 (b) rows; of the step's 32 bytes
};
// Register i of 4 of a.
MILLRACE_HOST_DEVICE inline constexpr Fp4Word fp4_a_word(int lane, int i) {
  return {lane / 4 + i % 2 * 8, lane % 4 * 4 + i / 2 * 16};
}
// Register i of 2 of b.
MILLRACE_HOST_DEVICE inline constexpr Fp4Word fp4_b_word(int lane, int i) {
  return {lane / 4, lane % 4 * 4 + i * 16};
}
// The row whose scales a lane brings.
MILLRACE_HOST_DEVICE inline constexpr int fp4_a_scale_row(int lane) { return lane / 4 + lane % 2 * 8; }
MILLRACE_HOST_DEVICE inline constexpr int fp4_b_scale_row(int lane) { return lane / 4; }

}  // namespace millrace::quant
