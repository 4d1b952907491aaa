// NFC by runs: a character that starts afresh (combining class 0, never the second half of a composition and
// its own NFC) ends the run before it, so almost all text is copied and only the few runs with marks are
// worked on.
#include "tokenizer/nfc.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "tokenizer/unicode.h"
#include "tokenizer/unicode_tables.h"

namespace millrace {
namespace {

constexpr uint32_t kHangulS = 0xac00, kHangulL = 0x1100, kHangulV = 0x1161, kHangulT = 0x11a7;
constexpr uint32_t kNumL = 19, kNumV = 21, kNumT = 28;
constexpr uint8_t kNotFresh = 255;  // class 0, but may change or combine with what is before it

struct Tables {
  CodePointTable combining{kCombiningRanges, kNumCombiningRanges};
  // Combining class, with kNotFresh for starters that do not end a run. 0: starts afresh.
  CodePointTable kind{kCombiningRanges, kNumCombiningRanges};
  std::unordered_map<uint32_t, const Decomposition*> decompositions;
  std::unordered_map<uint64_t, uint32_t> compositions;

  Tables() {
    decompositions.reserve(kNumDecompositions);
    for (size_t i = 0; i < kNumDecompositions; ++i) {
      const Decomposition& d = kDecompositions[i];
      decompositions[d.code_point] = &d;
      if (d.composes != 0) {
        compositions[static_cast<uint64_t>(d.first) << 32 | d.second] = d.code_point;
        mark(d.second);
      } else {
        mark(d.code_point);
      }
    }
    for (uint32_t i = 0; i < kNumV; ++i) mark(kHangulV + i);
    for (uint32_t i = 1; i < kNumT; ++i) mark(kHangulT + i);
  }
  void mark(uint32_t c) {
    if (combining[c] == 0) kind.set(c, kNotFresh);
  }
};

const Tables& tables() {
  static const Tables t;
  return t;
}

struct Mark {
  uint32_t code_point;
  uint8_t combining;
};

void decompose(const Tables& t, uint32_t c, std::vector<Mark>& out) {
  if (c - kHangulS < kNumL * kNumV * kNumT) {
    const uint32_t s = c - kHangulS;
    out.push_back({kHangulL + s / (kNumV * kNumT), 0});
    out.push_back({kHangulV + s / kNumT % kNumV, 0});
    if (s % kNumT != 0) out.push_back({kHangulT + s % kNumT, 0});
    return;
  }
  const auto found = t.decompositions.find(c);
  if (found == t.decompositions.end()) {
    out.push_back({c, t.combining[c]});
    return;
  }
  decompose(t, found->second->first, out);
  if (found->second->second != 0) decompose(t, found->second->second, out);
}

// The composition of a pair, 0 when there is none.
uint32_t compose(const Tables& t, uint32_t a, uint32_t b) {
  if (a - kHangulL < kNumL && b - kHangulV < kNumV)
    return kHangulS + ((a - kHangulL) * kNumV + (b - kHangulV)) * kNumT;
  if (a - kHangulS < kNumL * kNumV * kNumT && (a - kHangulS) % kNumT == 0 && b - kHangulT - 1 < kNumT - 1)
    return a + (b - kHangulT);
  const auto found = t.compositions.find(static_cast<uint64_t>(a) << 32 | b);
  return found == t.compositions.end() ? 0 : found->second;
}

void reorder(std::vector<Mark>& run) {
  for (size_t i = 0; i < run.size();) {
    if (run[i].combining == 0) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < run.size() && run[end].combining != 0) ++end;
    std::stable_sort(run.begin() + static_cast<std::ptrdiff_t>(i),
                     run.begin() + static_cast<std::ptrdiff_t>(end),
                     [](const Mark& a, const Mark& b) { return a.combining < b.combining; });
    i = end;
  }
}

void normalize_run(const Tables& t, std::string_view text, std::vector<Mark>& run, std::string& out) {
  run.clear();
  for (size_t i = 0, n = 0; i < text.size(); i += n) decompose(t, decode_valid_utf8(text.data() + i, n), run);
  reorder(run);
  // Each character joins the last starter unless one of equal or higher class stands between (D117).
  size_t kept = 0;
  size_t starter = SIZE_MAX;
  int last_class = -1;
  for (const Mark mark : run) {
    if (starter != SIZE_MAX && last_class < static_cast<int>(mark.combining)) {
      const uint32_t joined = compose(t, run[starter].code_point, mark.code_point);
      if (joined != 0) {
        run[starter].code_point = joined;
        continue;
      }
    }
    if (mark.combining == 0) {
      starter = kept;
      last_class = -1;
    } else {
      last_class = mark.combining;
    }
    run[kept++] = mark;
  }
  for (size_t i = 0; i < kept; ++i) append_utf8(out, run[i].code_point);
}

}  // namespace

bool is_nfc(std::string_view text) {
  const Tables& t = tables();
  for (size_t i = 0; i < text.size();) {
    // Below U+0300 (lead byte 0xcc) everything starts afresh; so does a byte that is no UTF-8.
    if (static_cast<uint8_t>(text[i]) < 0xcc) {
      ++i;
      continue;
    }
    size_t n = utf8_sequence_length(text.substr(i));
    if (n == 0) {
      ++i;
      continue;
    }
    if (t.kind[decode_valid_utf8(text.data() + i, n)] != 0) return false;
    i += n;
  }
  return true;
}

std::string to_nfc(std::string_view text) {
  const Tables& t = tables();
  std::string out;
  out.reserve(text.size());
  std::vector<Mark> scratch;
  size_t run_begin = 0;
  size_t run_chars = 0;
  bool fresh = true;  // the run's first character starts afresh
  const auto flush = [&](size_t end) {
    const std::string_view run = text.substr(run_begin, end - run_begin);
    if (run_chars <= 1 && fresh)
      out.append(run);
    else
      normalize_run(t, run, scratch, out);
    run_begin = end;
    run_chars = 0;
  };
  for (size_t i = 0; i < text.size();) {
    size_t n = utf8_sequence_length(text.substr(i));
    if (n == 0) {
      flush(i);
      out.push_back(text[i]);
      run_begin = ++i;
      continue;
    }
    const bool starts = t.kind[decode_valid_utf8(text.data() + i, n)] == 0;
    if (starts) flush(i);
    if (run_chars++ == 0) fresh = starts;
    i += n;
  }
  flush(text.size());
  return out;
}

std::string to_nfd(std::string_view text) {
  const Tables& t = tables();
  std::vector<Mark> marks;
  marks.reserve(text.size());
  for (size_t i = 0, n = 0; i < text.size(); i += n)
    decompose(t, decode_valid_utf8(text.data() + i, n), marks);
  reorder(marks);
  std::string out;
  out.reserve(text.size());
  for (const Mark& mark : marks) append_utf8(out, mark.code_point);
  return out;
}

}  // namespace millrace
