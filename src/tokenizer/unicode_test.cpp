// Character classes, and NFC.
#include "tokenizer/unicode.h"

#include <gtest/gtest.h>

#include "tokenizer/nfc.h"

namespace millrace {
namespace {

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
