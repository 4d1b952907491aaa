#include "grammar/runaway.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace millrace::grammar {
namespace {

bool is_set(std::span<const uint64_t> mask, int32_t token) {
  return (mask[static_cast<size_t>(token) / 64] >> (token % 64) & 1) != 0;
}

bool is_space(int byte) { return byte == ' ' || byte == '\n' || byte == '\t'; }
bool opens(int byte) { return byte == '{' || byte == '['; }

// Leaves the tokens of one byte for which `keep` holds, if the mask has any.
template <typename Keep>
bool keep_bytes(const Vocabulary& vocabulary, std::span<uint64_t> mask, Keep keep) {
  std::vector<int32_t> kept;
  for (int byte = 0; byte < 256; ++byte) {
    if (!keep(byte)) continue;
    for (int32_t t = vocabulary.token_of(static_cast<uint8_t>(byte)); t >= 0; t = vocabulary.next_same(t)) {
      if (is_set(mask, t)) kept.push_back(t);
    }
  }
  if (kept.empty()) return false;
  std::fill(mask.begin(), mask.end(), 0);
  for (const int32_t t : kept) mask[static_cast<size_t>(t) / 64] |= uint64_t{1} << (t % 64);
  return true;
}

}  // namespace

void Runaway::read(std::string_view bytes) {
  for (const char c : bytes) step(static_cast<uint8_t>(c));
  judge();
}

void Runaway::step(uint8_t c) {
  if (in_string_) {
    if (escaped_) {
      escaped_ = false;
    } else if (c == '\\') {
      escaped_ = true;
    } else if (c == '"') {
      in_string_ = closes_string_ = false;
    }
  } else if (c == '"') {
    in_string_ = true;
    string_begin_ = length_;
    near_ = {};
  } else if (opens(c)) {
    Container container;
    container.close = c == '{' ? '}' : ']';
    container.begin = length_;
    open_.push_back(container);
  } else if (c == '}' || c == ']') {
    if (!open_.empty()) open_.pop_back();
    if (open_.size() <= closes_to_) closes_to_ = kKeepsAll;
  } else if (c == ',' && !open_.empty()) {
    ++open_.back().items;
  }
  count_repeats(c);
  ++length_;
}

void Runaway::count_repeats(uint8_t c) {
  for (size_t p = 0; p < kShort; ++p) {
    near_[p] = recent_[p] == c ? near_[p] + 1 : near_[p] - std::min(near_[p], kMiss);
  }
  constexpr uint16_t kMost = std::numeric_limits<uint16_t>::max() - 1;
  for (size_t p = 0; p < kLongest; ++p) {
    const auto more = static_cast<uint16_t>(std::min(runs_[p], kMost) + 1);
    runs_[p] = recent_[p] == c ? more : uint16_t{0};
  }
  std::memmove(recent_.data() + 1, recent_.data(), kLongest - 1);
  recent_[0] = c;
}

// The bytes that repeat, of a piece longer than `shortest` and up to `longest`; 0 when they are too few.
size_t Runaway::longest_run(size_t shortest, size_t longest, size_t least) const {
  for (size_t p = shortest; p < longest; ++p) {
    if (runs_[p] >= std::max(least, kRepeats * (p + 1))) return runs_[p];
  }
  return 0;
}

bool Runaway::string_repeats() const {
  if (std::any_of(near_.begin(), near_.end(), [](size_t count) { return count >= kNearRun; })) return true;
  size_t run = longest_run(0, kShort, kShortRun);
  if (run == 0) run = longest_run(kShort, kLongestInString, kStringRun);
  return run > 0 && string_begin_ < length_ - run;
}

// The same between strings, where it takes more: rows of data may be equal.
size_t Runaway::container_run() const {
  bool has_string = false, is_list = true;  // of strings alone: no object, no array in the piece
  for (size_t p = 0; p < kLongest; ++p) {
    has_string = has_string || recent_[p] == '"';
    is_list =
        is_list && std::string_view("{}[]:").find(static_cast<char>(recent_[p])) == std::string_view::npos;
    size_t least = std::max(kContainerRun, kRepeats * (p + 1));
    if (has_string && is_list) least = std::min(least, std::max(kListRun, kListRepeats * (p + 1)));
    if (runs_[p] >= least) return runs_[p];
  }
  return 0;
}

// Something in the outermost `containers` ran on. Where that has happened too often, they are closed.
void Runaway::count_runaway(size_t containers, size_t counts) {
  for (size_t i = 0; i < containers; ++i) open_[i].runaways += counts;
  for (size_t i = containers; i-- > 0;) {
    if (open_[i].runaways < kMaxRunaways) continue;
    closes_to_ = std::min(closes_to_, i);
    return;
  }
}

void Runaway::close_string() {
  closes_string_ = true;
  count_runaway(open_.size(), 1);
}

void Runaway::close_containers(size_t to) {
  if (to >= closes_to_) return;
  closes_to_ = to;
  count_runaway(to, kContainerCounts);
}

void Runaway::judge() {
  if (in_string_) {
    const bool is_long = length_ - string_begin_ > kMaxStringBytes;
    if (!closes_string_ && (is_long || string_repeats())) close_string();
    if (closes_string_) return;
  }
  if (open_.empty()) return;
  if (const size_t run = container_run(); run > 0) {
    // Those that were open all the while; the innermost of them holds the pieces.
    const auto within = [&](const Container& container) { return container.begin >= length_ - run; };
    const auto around = static_cast<size_t>(std::find_if(open_.begin(), open_.end(), within) - open_.begin());
    if (around > 0) close_containers(around - 1);
  }
  if (open_.back().items > kMaxItems) close_containers(open_.size() - 1);
  if (open_.size() > kMaxDepth) closes_to_ = std::min(closes_to_, kMaxDepth);
}

void Runaway::narrow(const Vocabulary& vocabulary, std::span<uint64_t> mask) const {
  if (!closes_string_ && closes_to_ == kKeepsAll) return;
  if (in_string_) {
    if (!escaped_) keep_bytes(vocabulary, mask, [](int byte) { return byte == '"'; });
    return;
  }
  if (open_.empty()) return;
  const int close = open_.back().close;
  if (keep_bytes(vocabulary, mask, [&](int byte) { return byte == close; })) return;
  // A byte at a time, or a token would pass the place where it could be closed.
  if (keep_bytes(vocabulary, mask, [](int byte) { return !is_space(byte) && !opens(byte); })) return;
  keep_bytes(vocabulary, mask, [](int) { return true; });
}

}  // namespace millrace::grammar
