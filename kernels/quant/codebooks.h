// The codebooks of the IQ types: lists of groups of eight (or four) magnitudes, in ascending order when a
// group is read as a number whose first element is the lowest digit. So a codebook is a set, and is kept as
// one: a bit for each of the 3^8 (or 8^4) groups there could be (codebooks.cpp, written by
// tools/make_codebooks.py).
#pragma once

#include <array>
#include <cstdint>

namespace millrace::quant {

template <int kLength, int kMost>
struct Codebook {
  using Entry = std::array<int8_t, kLength>;
  std::array<Entry, kMost> entries;
};
using Codebook8 = Codebook<8, 2048>;  // entries that a type does not have are zero
using Codebook4 = Codebook<4, 512>;

const Codebook8& codebook_iq2_xxs();  // 256 entries of 8, 25, 43
const Codebook8& codebook_iq2_xs();   // 512
const Codebook8& codebook_iq2_s();    // 1,024
const Codebook8& codebook_iq1();      // 2,048 of -1, 0, 1
const Codebook4& codebook_iq3_xxs();  // 256 of 4, 12, 20 .. 52, 62
const Codebook4& codebook_iq3_s();    // 512 of 1, 3, 5 .. 15

}  // namespace millrace::quant
