// The data of bert_normalizer.cpp as runs; the numbers are written by tools/make_bert_tables.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace millrace {

enum BertFlags : uint8_t {
  kBertRemoved = 1,      // dropped by clean_text
  kBertSpace = 2,        // parts words
  kBertAccent = 4,       // dropped by strip_accents, once decomposed
  kBertPunctuation = 8,  // a word of its own
  kBertChinese = 16,     // a word of its own with handle_chinese_chars
};

// start << 8 | flags: hold from start up to the next entry's start.
extern const uint32_t kBertFlagRanges[];
extern const size_t kNumBertFlagRanges;

// first, first + stride, ..., last each have themselves + delta as their lower case.
struct LowerRun {
  uint32_t first, last, stride;
  int32_t delta;
};
extern const LowerRun kBertLowerRuns[];
extern const size_t kNumBertLowerRuns;

}  // namespace millrace
