// The data of unicode.cpp and nfc.cpp as runs, small enough to be read in a diff. The numbers are written by
// tools/make_unicode_tables.py; the first use of unicode.h spreads them into tables that index in two steps.
#pragma once

#include <cstddef>
#include <cstdint>

namespace millrace {

// start << 8 | value: the value holds from start up to the next entry's start.
extern const uint32_t kFlagRanges[];  // CharFlags of unicode.h
extern const size_t kNumFlagRanges;
extern const uint32_t kSymbolRanges[];  // 1: \p{S}
extern const size_t kNumSymbolRanges;
extern const uint32_t kCombiningRanges[];  // canonical combining class
extern const size_t kNumCombiningRanges;

// One step of canonical decomposition, sorted by code point. Hangul syllables are arithmetic and not listed.
struct Decomposition {
  uint32_t code_point;
  uint32_t first;
  uint32_t second;    // 0: a singleton
  uint32_t composes;  // 1: first, second compose to code_point under NFC
};
extern const Decomposition kDecompositions[];
extern const size_t kNumDecompositions;

}  // namespace millrace
