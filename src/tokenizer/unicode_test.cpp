// UTF-8 at its edges, and NFC.
#include "tokenizer/unicode.h"

#include <gtest/gtest.h>

#include "tokenizer/nfc.h"

namespace millrace {
namespace {

TEST(Unicode, SequenceLengths) {
  EXPECT_EQ(utf8_sequence_length(""), 0u);
  EXPECT_EQ(utf8_sequence_length("a"), 1u);
  EXPECT_EQ(utf8_sequence_length("\xc3\xa9"), 2u);
  EXPECT_EQ(utf8_sequence_length("\xf0\x9f\x99\x82"), 4u);
  for (const char* bad : {"\x80", "\xc0\xaf", "\xc1\xbf", "\xe0\x80\x80", "\xed\xa0\x80", "\xf0\x80\x80\x80",
                          "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xe4\xb8", "\xc3(", "\xe4\xb8("})
    EXPECT_EQ(utf8_sequence_length(bad), 0u) << bad;
}

TEST(Unicode, LossyReplacesMaximalParts) {
  EXPECT_EQ(utf8_lossy("a\xe4\xb8z"), "a\xef\xbf\xbdz");
  EXPECT_EQ(utf8_lossy("\xed\xa0\x80"), "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_EQ(utf8_lossy("\xf0\x9f\x99\xf0\x9f\x99\x82\xff"), "\xef\xbf\xbd\xf0\x9f\x99\x82\xef\xbf\xbd");
}

TEST(Unicode, IncompleteSuffixes) {
  EXPECT_EQ(incomplete_utf8_suffix("abc"), 0u);
  EXPECT_EQ(incomplete_utf8_suffix("a\xc3"), 1u);
  EXPECT_EQ(incomplete_utf8_suffix("a\xf0\x9f\x99"), 3u);
  EXPECT_EQ(incomplete_utf8_suffix("\xf0\x9f\x99\x82"), 0u);
  EXPECT_EQ(incomplete_utf8_suffix("a\xe0\x80"), 0u);  // can become nothing
  EXPECT_EQ(incomplete_utf8_suffix("\x80\x80\x80"), 0u);
}

TEST(Unicode, Classes) {
  const CodePointTable& t = char_flags_table();
  EXPECT_EQ(t['a'], kLetter | kLowerish | kWordChar);
  EXPECT_EQ(t['A'], kLetter | kUpperish | kWordChar);
  EXPECT_EQ(t[0x4e2d], kLetter | kUpperish | kLowerish | kWordChar);
  EXPECT_EQ(t[0x301], kUpperish | kLowerish | kWordChar);
  EXPECT_EQ(t['\n'], kSpace | kNewline);
  EXPECT_EQ(t[0x85], kSpace);
  EXPECT_EQ(t[0x1c], 0);  // white space for Python, not for the expressions
  EXPECT_EQ(t[0xbd], kNumber);
  EXPECT_EQ(t[0x1c89], kLetter | kUpperish | kWordChar);  // new in Unicode 16.0
  EXPECT_EQ(t[0x10ffff], 0);
}

TEST(Nfc, ComposesAndReorders) {
  EXPECT_EQ(to_nfc("e\xcc\x81"), "\xc3\xa9");
  EXPECT_EQ(to_nfc("q\xcc\x87\xcc\xa3"), "q\xcc\xa3\xcc\x87");                // dot below first
  EXPECT_EQ(to_nfc("\xe2\x84\xab"), "\xc3\x85");                              // angstrom sign
  EXPECT_EQ(to_nfc("\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab"), "\xed\x95\x9c");  // Hangul
  EXPECT_EQ(to_nfc("\xe0\xa5\x98"), "\xe0\xa4\x95\xe0\xa4\xbc");              // excluded from composition
  EXPECT_EQ(to_nfc("a\xcc\x96\xcc\x80"), "\xc3\xa0\xcc\x96");                 // over a mark of lower class
  EXPECT_EQ(to_nfc("e\xff\xcc\x81x"), "e\xff\xcc\x81x");                      // ill-formed bytes part
  EXPECT_EQ(to_nfc(""), "");
}

TEST(Nfc, QuickCheckAgrees) {
  EXPECT_TRUE(is_nfc("plain \xc3\xa9 \xe4\xb8\xad \xff"));
  EXPECT_FALSE(is_nfc("e\xcc\x81"));
  EXPECT_FALSE(is_nfc("\xe2\x84\xab"));
}

}  // namespace
}  // namespace millrace
