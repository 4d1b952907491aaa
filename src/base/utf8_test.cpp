// UTF-8 at its edges.
#include "base/utf8.h"

#include <gtest/gtest.h>

namespace millrace {
namespace {

TEST(Utf8, SequenceLengths) {
  EXPECT_EQ(utf8_sequence_length(""), 0u);
  EXPECT_EQ(utf8_sequence_length("a"), 1u);
  EXPECT_EQ(utf8_sequence_length("\xc3\xa9"), 2u);
  EXPECT_EQ(utf8_sequence_length("\xf0\x9f\x99\x82"), 4u);
  for (const char* bad : {"\x80", "\xc0\xaf", "\xc1\xbf", "\xe0\x80\x80", "\xed\xa0\x80", "\xf0\x80\x80\x80",
                          "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xe4\xb8", "\xc3(", "\xe4\xb8("})
    EXPECT_EQ(utf8_sequence_length(bad), 0u) << bad;
}

TEST(Utf8, LossyReplacesMaximalParts) {
  EXPECT_EQ(valid_utf8("a\xe4\xb8z"), "a\xef\xbf\xbdz");
  EXPECT_EQ(valid_utf8("\xed\xa0\x80"), "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_EQ(valid_utf8("\xf0\x9f\x99\xf0\x9f\x99\x82\xff"), "\xef\xbf\xbd\xf0\x9f\x99\x82\xef\xbf\xbd");
}

TEST(Utf8, IncompleteSuffixes) {
  EXPECT_EQ(incomplete_utf8_suffix("abc"), 0u);
  EXPECT_EQ(incomplete_utf8_suffix("a\xc3"), 1u);
  EXPECT_EQ(incomplete_utf8_suffix("a\xf0\x9f\x99"), 3u);
  EXPECT_EQ(incomplete_utf8_suffix("\xf0\x9f\x99\x82"), 0u);
  EXPECT_EQ(incomplete_utf8_suffix("a\xe0\x80"), 0u);  // can become nothing
  EXPECT_EQ(incomplete_utf8_suffix("\x80\x80\x80"), 0u);
}

TEST(Utf8, WhatIsAppendedIsDecoded) {
  for (const uint32_t c :
       {0x00u, 0x7fu, 0x80u, 0x7ffu, 0x800u, 0xd7ffu, 0xe000u, 0xffffu, 0x10000u, 0x10ffffu}) {
    std::string text;
    append_utf8(text, c);
    EXPECT_EQ(utf8_sequence_length(text), text.size()) << c;
    size_t length = 0;
    EXPECT_EQ(decode_valid_utf8(text.data(), length), c);
    EXPECT_EQ(length, text.size());
  }
}

}  // namespace
}  // namespace millrace
