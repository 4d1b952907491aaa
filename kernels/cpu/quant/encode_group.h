// What the encoders of groups of blocks share: sums over what the codes miss, scales as f16 stores them,
// codes to their blocks, and the loop over groups.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <cstring>

#include "kernels/cpu/quant/encode_table.h"
#include "kernels/cpu/quant/group_values.h"
#include "kernels/cpu/simd/lanes.h"
#include "kernels/quant/blocks.h"

namespace millrace::quant::MILLRACE_TARGET {
namespace {

constexpr float kMaxHalf = 65504.0f;

// Sums of squares of misses and of values, a lane for every element of a part.
struct Misses {
  V error = Lanes::all(0.0f), total = Lanes::all(0.0f);
  void add(V off, V value) {
    error = Lanes::fma(off, off, error);
    total = Lanes::fma(value, value, total);
  }
  EncodeSums sums() const {
    float errors[Lanes::kBlocks], totals[Lanes::kBlocks];
    Lanes::store(errors, error);
    Lanes::store(totals, total);
    EncodeSums out;
    for (int i = 0; i < Lanes::kBlocks; ++i) {
      out.error += errors[i];
      out.total += totals[i];
    }
    return out;
  }
};

// A number of each block as the f16 that is stored, always finite and never -0, and what it then is.
struct StoredHalves {
  uint16_t bits[Lanes::kBlocks];
  V value;
  explicit StoredHalves(V wanted) {
    const V held = Lanes::max(Lanes::min(wanted, Lanes::all(kMaxHalf)), Lanes::all(-kMaxHalf));
    Lanes::store_halves(bits, Lanes::add(held, Lanes::all(0.0f)));
    value = Lanes::load_halves(bits);
  }
};

// Four bytes' fifth bits side by side: the product brings bit 8 i + 4 to bit 28 + i.
inline void pack_fifth_bits(const uint8_t* codes, uint8_t* high) {
  for (int j = 0; j < 4; ++j) {
    uint32_t words[2];
    std::memcpy(words, codes + 8 * j, sizeof words);
    const auto four = [](uint32_t w) { return ((w >> 4 & 0x01010101u) * 0x01020408u) >> 24 & 15u; };
    high[j] = static_cast<uint8_t>(four(words[0]) | four(words[1]) << 4);
  }
}

// The codes of a group to its blocks: four bits, and the fifth ones where there are any.
template <class Block>
inline void put_codes(const Bytes* quads, Block* out) {
  constexpr bool kFive = sizeof(out->q) + 4 < sizeof(Block);
  Bytes pairs[4];
  for (int t = 0; t < 4; ++t) {
    pairs[t] = kFive ? Lanes::nibbles(Lanes::and_bytes(quads[t], 15), Lanes::and_bytes(quads[t + 4], 15))
                     : Lanes::nibbles(quads[t], quads[t + 4]);
  }
  Lanes::store_codes(pairs, reinterpret_cast<uint8_t*>(out) + offsetof(Block, q), sizeof(Block));
  if constexpr (kFive) {
    uint8_t codes[Lanes::kBlocks * kBlock];
    Lanes::store_codes(quads, codes, kBlock);
    Lanes::store_codes(quads + 4, codes + 16, kBlock);
    for (int b = 0; b < Lanes::kBlocks; ++b) pack_fifth_bits(codes + b * kBlock, out[b].high);
  }
}

// Every encoder goes through its steps for kBatch groups, one step after the other: a step ends in divisions
// and conversions that wait for each other, and the next group's beginning has no need to wait for them.
constexpr int kBatch = 4;
constexpr int kGroupElements = Lanes::kBlocks * kBlock;

// Hands groups of blocks to `encode`, kBatch at a time, the last one filled up with zeros.
template <class Block, void (*kEncode)(const float*, int, Block*, Misses&)>
EncodeSums encode_groups(const float* x, int64_t blocks, uint8_t* out) {
  constexpr int kGroup = Lanes::kBlocks;
  Misses misses;
  int64_t done = 0;
  const auto at = [&] { return reinterpret_cast<Block*>(out + done * static_cast<int64_t>(sizeof(Block))); };
  for (; done + kGroup <= blocks;) {
    const int64_t whole = (blocks - done) / kGroup;
    const int groups = whole < kBatch ? static_cast<int>(whole) : kBatch;
    kEncode(x + done * kBlock, groups, at(), misses);
    done += groups * kGroup;
  }
  if (done < blocks) {
    const auto count = static_cast<size_t>(blocks - done);
    float padded[kGroupElements] = {};
    Block last[kGroup];
    std::memcpy(padded, x + done * kBlock, count * kBlock * sizeof(float));
    kEncode(padded, 1, last, misses);
    std::memcpy(at(), last, count * sizeof(Block));
  }
  return misses.sums();
}

}  // namespace
}  // namespace millrace::quant::MILLRACE_TARGET
