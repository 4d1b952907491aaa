// The order of columns in a bf16 tile of 32: how MXFP4 weights fall when their nibbles are unpacked, and so
// how activations are laid out.
#pragma once

#include <stdint.h>

#include "kernels/cpu/simd/target.h"

namespace millrace::cpu::MILLRACE_TARGET {
namespace {

// The order of the columns of a block in a tile, which is how the nibbles of a GGUF block fall: byte i holds
// columns i and i + 16, dword j bytes 4 j .. 4 j + 3. Shifted by n nibbles, both words of dword j begin with
// columns of pair 4 j + n.
constexpr int tile_column(int place) {
  const int pair = place / 2, dword = pair / 4, nibble = pair % 4;
  return 4 * dword + nibble / 2 + 16 * (nibble % 2) + 2 * (place % 2);
}
struct TileOrder {
  uint16_t word[32];  // of a place: columns c and c + 16 are words 2 c and 2 c + 1
};
constexpr TileOrder make_tile_order() {
  TileOrder order{};
  for (int place = 0; place < 32; ++place) {
    const int column = tile_column(place);
    order.word[place] = static_cast<uint16_t>(2 * (column % 16) + column / 16);
  }
  return order;
}
alignas(64) constexpr TileOrder kTileOrder = make_tile_order();

}  // namespace
}  // namespace millrace::cpu::MILLRACE_TARGET
