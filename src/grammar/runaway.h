// Brings JSON that runs on to its end. A string, an array or an object without bounds may go on as long as
// its grammar lets it, and a model that has begun to repeat itself never stops. This watches the text: once
// the same piece has come over and over, what it is part of is closed at the first place where it can be.
//
// In a string that is the closing quote, where the string may end. Around it, a byte at a time: what closes
// the innermost container where that may come, else what opens no other one. So the answer still matches its
// grammar, and a mask is narrowed only while something is being closed.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "grammar/mask_vocabulary.h"

namespace millrace::grammar {

class Runaway {
 public:
  // A piece of at most kLongestInString bytes that fills kStringRun bytes of a string, eight times over at
  // least, is a loop. Rulers, indents and tables of real answers stay below. Between strings zeros and equal
  // rows are common: there it takes kContainerRun bytes, or kListRun where the same strings of a list come
  // again and again, which data seldom has.
  static constexpr size_t kLongestInString = 256, kLongest = 512, kRepeats = 8, kListRepeats = 24;
  static constexpr size_t kStringRun = 512, kContainerRun = 2048, kListRun = 768;
  // Pieces of a few bytes are seen sooner, and where now and then a byte differs: 1111211111. A byte that
  // equals the one before counts for it, one that does not counts kMiss times against.
  static constexpr size_t kShort = 4, kShortRun = 256, kNearRun = 512, kMiss = 8;
  // A container in which so many strings ran on is closed with the last of them; one in it counts for two.
  static constexpr size_t kMaxRunaways = 4, kContainerCounts = 2;
  // What never repeats ends too: no schema can ask for more than 100,000 characters or 10,000 items.
  static constexpr size_t kMaxStringBytes = 400'000, kMaxItems = 10'000, kMaxDepth = 64;

  void read(std::string_view bytes);  // more of the text
  // Leaves what closes, of the tokens that the grammar allows; changes nothing unless something is closed.
  void narrow(const Vocabulary& vocabulary, std::span<uint64_t> mask) const;

 private:
  struct Container {
    char close = 0;
    uint64_t begin = 0;  // the place of its bracket in the text
    size_t items = 1;
    size_t runaways = 0;  // strings and containers in it that had to be closed
  };
  void step(uint8_t c);
  void count_repeats(uint8_t c);
  size_t longest_run(size_t shortest, size_t longest, size_t least) const;
  size_t container_run() const;
  bool string_repeats() const;
  void judge();
  void close_string();
  void close_containers(size_t to);
  void count_runaway(size_t containers, size_t counts);

  uint64_t length_ = 0;  // of the text
  bool in_string_ = false, escaped_ = false;
  uint64_t string_begin_ = 0;
  std::vector<Container> open_;
  bool closes_string_ = false;  // the string being read is to end
  static constexpr size_t kKeepsAll = ~size_t{0};
  size_t closes_to_ = kKeepsAll;               // containers are closed until so many are open
  std::array<uint8_t, kLongest> recent_ = {};  // the last bytes, the latest first
  std::array<size_t, kShort> near_ = {};       // [p]: of this string, what counts for a repeat
  std::array<uint16_t, kLongest> runs_ = {};   // [p]: so many bytes equal the one p + 1 before them
};

}  // namespace millrace::grammar
