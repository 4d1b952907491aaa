// The operands that lanes load for m16n8k64 with block scales, put through what the instruction is documented
// to do with them (PTX ISA, warp-level block scaling), against the product of the rows.
#include "kernels/quant/fp4_fragments.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "base/float_bits.h"

namespace millrace::quant {
namespace {

constexpr int kLanes = 32;

double e2m1_value(uint32_t code) {
  constexpr double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code < 8 ? kValues[code] : -kValues[code - 8];
}

struct Rows {  // of 64 columns
  std::vector<uint8_t> codes, scales;
  int blocks;
  Rows(std::mt19937& random, int rows, int blocks_of_row) : blocks(blocks_of_row) {
    for (int i = 0; i < rows * kFp4StepBytes; ++i) codes.push_back(static_cast<uint8_t>(random()));
    for (int i = 0; i < rows * blocks; ++i) {
      scales.push_back(static_cast<uint8_t>(blocks == 4 ? random() % 0x7f : 120 + random() % 16));
    }
  }
  double scale_value(uint8_t stored) const {
    return blocks == 4 ? to_float(Fp8E4M3{stored}) : std::ldexp(1.0, stored - 127);
  }
  double at(int row, int k) const {
    const uint32_t code = codes[static_cast<size_t>(row * kFp4StepBytes + k / 2)] >> (4 * (k % 2)) & 15u;
    return e2m1_value(code) * scale_value(scales[static_cast<size_t>(row * blocks + k * blocks / 64)]);
  }
  // As a lane loads them.
  uint32_t word(Fp4Word w) const {
    uint32_t v;
    std::memcpy(&v, codes.data() + w.row * kFp4StepBytes + w.byte, 4);
    return v;
  }
  uint32_t scale_word(int row) const {
    uint32_t v = 0;
    std::memcpy(&v, scales.data() + row * blocks, static_cast<size_t>(blocks));
    return v;
  }
};

void compare_with_emulation(int blocks) {
  std::mt19937 random(7);
  const Rows a(random, 16, blocks), b(random, 8, blocks);
  uint32_t a_words[kLanes][4], b_words[kLanes][2], a_scales[kLanes], b_scales[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) a_words[lane][i] = a.word(fp4_a_word(lane, i));
    for (int i = 0; i < 2; ++i) b_words[lane][i] = b.word(fp4_b_word(lane, i));
    a_scales[lane] = a.scale_word(fp4_a_scale_row(lane));
    b_scales[lane] = b.scale_word(fp4_b_scale_row(lane));
  }
  // What the instruction sees: element (row, k) is nibble k % 8 of register (row / 8) + 2 (k / 32) of lane
  // 4 (row % 8) + k % 32 / 8; thread-id 0 and byte-id 0 for the scales.
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 8; ++column) {
      double seen = 0, expected = 0;
      for (int k = 0; k < 64; ++k) {
        const uint32_t code_a =
            a_words[4 * (row % 8) + k % 32 / 8][row / 8 + 2 * (k / 32)] >> (4 * (k % 8)) & 15u;
        const uint32_t code_b = b_words[4 * column + k % 32 / 8][k / 32] >> (4 * (k % 8)) & 15u;
        const int byte = k * blocks / 64;
        const auto scale_a = static_cast<uint8_t>(a_scales[4 * (row % 8) + row / 8] >> (8 * byte));
        const auto scale_b = static_cast<uint8_t>(b_scales[4 * column] >> (8 * byte));
        seen += e2m1_value(code_a) * a.scale_value(scale_a) * e2m1_value(code_b) * b.scale_value(scale_b);
        expected += a.at(row, k) * b.at(column, k);
      }
      ASSERT_EQ(seen, expected) << row << ", " << column;
    }
  }
}

TEST(Fp4Fragments, Nvfp4AsTheInstructionReadsThem) { compare_with_emulation(4); }
TEST(Fp4Fragments, Mxfp4AsTheInstructionReadsThem) { compare_with_emulation(2); }

}  // namespace
}  // namespace millrace::quant
