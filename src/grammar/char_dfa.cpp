#include "grammar/char_dfa.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/work_budget.h"

namespace millrace::grammar {
namespace {

constexpr size_t kMaxDfaStates = 20'000;
constexpr size_t kMaxDfaWork = 5'000'000;       // places visited: some tenths of a second
constexpr size_t kMaxTableEntries = 4'000'000;  // states times classes: 16 MB

void check_size(size_t states, size_t classes, const std::string& what) {
  if (states > kMaxDfaStates || states * classes > kMaxTableEntries)
    throw_error(ErrorCode::kUnsupported, "{}: takes an automaton of more than {} states", what,
                std::min(kMaxDfaStates, kMaxTableEntries / std::max<size_t>(classes, 1)));
}

// A place in an NFA: state * 4, + 1 once something was read, + 2 once the end was asked for.
constexpr uint32_t kRead = 1, kEnded = 2;

void close(const CharNfa& nfa, std::vector<uint32_t>& places, size_t& work, const std::string& what) {
  for (size_t i = 0; i < places.size(); ++i) {
    const uint32_t flags = places[i] & 3;
    spend_work(4);
    if (++work > kMaxDfaWork)
      throw_error(ErrorCode::kUnsupported, "{}: repetitions in repetitions take too many steps", what);
    for (const CharNfa::Edge& edge : nfa.states[places[i] / 4]) {
      uint32_t to = edge.target * 4 + flags;
      if (edge.kind == CharNfa::Edge::Kind::kSet) continue;
      if (edge.kind == CharNfa::Edge::Kind::kAtBegin && (flags & kRead) != 0) continue;
      if (edge.kind == CharNfa::Edge::Kind::kAtEnd) to |= kEnded;
      places.push_back(to);
    }
    // Duplicates would grow the list forever around a ring of empty edges.
    if ((i & (i + 1)) == 0 || i + 1 == places.size()) {
      std::vector<uint32_t> seen(places.begin(), places.begin() + static_cast<ptrdiff_t>(i) + 1);
      std::sort(seen.begin(), seen.end());
      std::vector<uint32_t> rest;
      for (size_t j = i + 1; j < places.size(); ++j) {
        if (!std::binary_search(seen.begin(), seen.end(), places[j])) rest.push_back(places[j]);
      }
      std::sort(rest.begin(), rest.end());
      rest.erase(std::unique(rest.begin(), rest.end()), rest.end());
      places.resize(i + 1);
      places.insert(places.end(), rest.begin(), rest.end());
    }
  }
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
}

}  // namespace

CharDfa CharDfa::from_nfa(const CharNfa& nfa, const std::string& what) {
  CharDfa dfa;
  // Classes: segments between all bounds of all sets, alike when the same sets hold them.
  std::vector<uint32_t> bounds = {0};
  for (const CodepointSet& set : nfa.sets) {
    for (const CodepointRange& range : set.ranges()) {
      bounds.push_back(range.first);
      if (range.last < kLastCodepoint) bounds.push_back(range.last + 1);
    }
  }
  std::sort(bounds.begin(), bounds.end());
  bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
  std::map<std::vector<uint32_t>, uint32_t> classes;
  std::vector<std::vector<uint32_t>> members;  // [class][set]
  dfa.bounds_ = bounds;
  dfa.class_of_segment_.clear();
  for (const uint32_t bound : bounds) {
    spend_work(1 + nfa.sets.size());
    std::vector<uint32_t> in(nfa.sets.size());
    for (size_t i = 0; i < nfa.sets.size(); ++i) in[i] = nfa.sets[i].contains(bound) ? 1 : 0;
    const auto [it, is_new] = classes.try_emplace(in, static_cast<uint32_t>(members.size()));
    if (is_new) members.push_back(in);
    dfa.class_of_segment_.push_back(it->second);
  }
  dfa.num_classes_ = static_cast<uint32_t>(members.size());

  size_t work = 0;
  std::map<std::vector<uint32_t>, uint32_t> ids;
  std::vector<std::vector<uint32_t>> subsets;
  const auto intern = [&](std::vector<uint32_t> places) {
    close(nfa, places, work, what);
    const auto [it, is_new] = ids.try_emplace(places, static_cast<uint32_t>(subsets.size()));
    if (is_new) {
      check_size(subsets.size() + 1, dfa.num_classes_, what);
      dfa.accepting_.push_back(
          std::any_of(places.begin(), places.end(), [&](uint32_t p) { return p / 4 == nfa.accept; }));
      subsets.push_back(std::move(places));
    }
    return it->second;
  };
  intern({nfa.start * 4});
  for (size_t s = 0; s < subsets.size(); ++s) {
    std::vector<std::vector<uint32_t>> targets(dfa.num_classes_);
    for (const uint32_t place : subsets[s]) {
      if ((place & kEnded) != 0) continue;
      for (const CharNfa::Edge& edge : nfa.states[place / 4]) {
        if (edge.kind != CharNfa::Edge::Kind::kSet) continue;
        spend_work(1 + dfa.num_classes_ / 8);
        for (uint32_t c = 0; c < dfa.num_classes_; ++c) {
          if (members[c][edge.set] != 0) targets[c].push_back(edge.target * 4 + kRead);
        }
      }
    }
    for (std::vector<uint32_t>& places : targets) {
      std::sort(places.begin(), places.end());
      places.erase(std::unique(places.begin(), places.end()), places.end());
      dfa.next_.push_back(intern(std::move(places)));
    }
  }
  return dfa;
}

CharDfa CharDfa::everything() {
  CharDfa dfa;
  dfa.next_ = {0};
  dfa.accepting_ = {1};
  return dfa;
}

CharDfa CharDfa::of_texts(const std::vector<std::string>& texts, const std::string& what) {
  CharNfa nfa;
  std::map<uint32_t, uint32_t> set_of;
  nfa.start = nfa.add_state();
  nfa.accept = nfa.add_state();
  for (const std::string& text : texts) {
    uint32_t at = nfa.start;
    for (size_t pos = 0; pos < text.size();) {
      const uint32_t c = next_codepoint(text, pos, what);
      const auto [it, is_new] = set_of.try_emplace(c, static_cast<uint32_t>(nfa.sets.size()));
      if (is_new) nfa.sets.emplace_back(c, c);
      const uint32_t to = nfa.add_state();
      nfa.states[at].push_back({CharNfa::Edge::Kind::kSet, it->second, to});
      at = to;
    }
    nfa.states[at].push_back({CharNfa::Edge::Kind::kEmpty, 0, nfa.accept});
  }
  return from_nfa(nfa, what);
}

CharDfa CharDfa::of_lengths(uint32_t min, uint32_t max, const std::string& what) {
  CharDfa dfa;
  const uint64_t last = max == kUnbounded ? min : max;
  check_size(last + 2, 1, what);
  for (uint32_t s = 0; s <= last; ++s) {
    dfa.accepting_.push_back(s >= min && s <= max);
    dfa.next_.push_back(s == last && max == kUnbounded ? s : s + 1);
  }
  dfa.accepting_.push_back(0);
  dfa.next_.push_back(static_cast<uint32_t>(last) + 1);
  return dfa;
}

CharDfa CharDfa::of_multiples(uint32_t modulus, uint32_t places, const std::string& what) {
  // State: remainder of the digits so far, times (places + 2), plus the decimals seen + 1, or 0 before the
  // point. The last state is the dead one. Classes: 0 others, 1 the sign, 2 the point, 3.. the digits.
  CharDfa dfa;
  dfa.bounds_ = {0, '-', '.', '/', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9', ':'};
  dfa.class_of_segment_ = {0, 1, 2, 0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0};
  dfa.num_classes_ = 13;
  const uint64_t phases = places + 2, dead = modulus * phases;
  check_size(dead + 1, dfa.num_classes_, what);
  for (uint64_t s = 0; s <= dead; ++s) {
    const uint64_t remainder = s / phases, phase = s % phases;
    uint64_t padded = remainder;
    for (uint64_t i = phase == 0 ? 0 : phase - 1; i < places; ++i) padded = padded * 10 % modulus;
    dfa.accepting_.push_back(s != dead && padded == 0);
    for (uint32_t c = 0; c < dfa.num_classes_; ++c) {
      uint64_t to = dead;
      if (s != dead && c == 1 && s == 0) to = 0;
      if (s != dead && c == 2 && phase == 0) to = s + 1;
      if (s != dead && c >= 3) {
        const uint64_t digits = (remainder * 10 + (c - 3)) % modulus;
        if (phase == 0) to = digits * phases;
        if (phase > 0 && phase <= places) to = digits * phases + phase + 1;
        if (phase == places + 1 && c == 3) to = s;  // further zeros change nothing
      }
      dfa.next_.push_back(static_cast<uint32_t>(to));
    }
  }
  return dfa;
}

CharDfa CharDfa::complement() const {
  CharDfa result = *this;
  for (uint8_t& accepting : result.accepting_) accepting = accepting == 0;
  return result;
}

CharDfa CharDfa::intersection(const CharDfa& other, const std::string& what) const {
  return product(other, true, what);
}

CharDfa CharDfa::united(const CharDfa& other, const std::string& what) const {
  return product(other, false, what);
}

CharDfa CharDfa::product(const CharDfa& other, bool both, const std::string& what) const {
  CharDfa result;
  result.bounds_.clear();
  result.class_of_segment_.clear();
  std::merge(bounds_.begin(), bounds_.end(), other.bounds_.begin(), other.bounds_.end(),
             std::back_inserter(result.bounds_));
  result.bounds_.erase(std::unique(result.bounds_.begin(), result.bounds_.end()), result.bounds_.end());
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> classes;
  std::vector<std::pair<uint32_t, uint32_t>> pair_of;
  for (const uint32_t bound : result.bounds_) {
    const std::pair pair = {class_of(bound), other.class_of(bound)};
    const auto [it, is_new] = classes.try_emplace(pair, static_cast<uint32_t>(pair_of.size()));
    if (is_new) pair_of.push_back(pair);
    result.class_of_segment_.push_back(it->second);
  }
  result.num_classes_ = static_cast<uint32_t>(pair_of.size());
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> ids;
  std::vector<std::pair<uint32_t, uint32_t>> states;
  const auto intern = [&](std::pair<uint32_t, uint32_t> pair) {
    const auto [it, is_new] = ids.try_emplace(pair, static_cast<uint32_t>(states.size()));
    if (is_new) {
      check_size(states.size() + 1, result.num_classes_, what);
      states.push_back(pair);
      const bool a = accepting_[pair.first] != 0, b = other.accepting_[pair.second] != 0;
      result.accepting_.push_back(both ? a && b : a || b);
    }
    return it->second;
  };
  intern({0, 0});
  for (size_t s = 0; s < states.size(); ++s) {
    spend_work(1 + 4 * pair_of.size());
    for (const auto& [a, b] : pair_of) {
      result.next_.push_back(intern({next(states[s].first, a), other.next(states[s].second, b)}));
    }
  }
  return result;
}

uint32_t CharDfa::class_of(uint32_t codepoint) const {
  const auto it = std::upper_bound(bounds_.begin(), bounds_.end(), codepoint);
  return class_of_segment_[static_cast<size_t>(it - bounds_.begin()) - 1];
}

bool CharDfa::empty() const {
  return std::all_of(accepting_.begin(), accepting_.end(), [](uint8_t accepting) { return accepting == 0; });
}

bool CharDfa::matches(std::string_view utf8) const {
  uint32_t state = 0;
  for (size_t pos = 0; pos < utf8.size();) state = next(state, class_of(next_codepoint(utf8, pos, "text")));
  return accepting_[state] != 0;
}

ExprId CharDfa::expression(GrammarBuilder& builder, bool json) const {
  Graph graph;
  graph.num_nodes = static_cast<uint32_t>(num_states());
  std::vector<CodepointSet> sets(num_classes_);
  for (size_t i = 0; i < bounds_.size(); ++i) {
    const uint32_t last = i + 1 < bounds_.size() ? bounds_[i + 1] - 1 : kLastCodepoint;
    sets[class_of_segment_[i]].add(bounds_[i], last);
  }
  // What cannot end any more is left out: a graph full of dead ends would only be trimmed later.
  std::vector<uint8_t> alive(accepting_.begin(), accepting_.end());
  for (bool grew = true; grew;) {
    grew = false;
    for (uint32_t s = graph.num_nodes; s-- > 0;) {
      spend_work(1 + num_classes_ / 8);
      for (uint32_t c = 0; c < num_classes_ && alive[s] == 0; ++c) {
        if (alive[next(s, c)] != 0) alive[s] = grew = true;
      }
    }
  }
  std::map<std::vector<uint32_t>, ExprId> expr_of;  // classes -> the set of their characters
  for (uint32_t s = 0; s < graph.num_nodes; ++s) {
    if (accepting_[s] != 0) graph.accepting.push_back(s);
    std::map<uint32_t, std::vector<uint32_t>> classes_to;
    for (uint32_t c = 0; c < num_classes_; ++c) {
      if (alive[next(s, c)] != 0) classes_to[next(s, c)].push_back(c);
    }
    for (const auto& [target, classes] : classes_to) {
      const auto [it, is_new] = expr_of.try_emplace(classes, 0);
      if (is_new) {
        CodepointSet set;
        for (const uint32_t c : classes) set.add(sets[c]);
        it->second = json ? json_characters(builder, set) : builder.set(set);
      }
      graph.edges.push_back({s, target, it->second});
    }
  }
  return builder.graph(std::move(graph));
}

ExprId json_characters(GrammarBuilder& builder, const CodepointSet& set) {
  CodepointSet plain(0x20, kLastCodepoint);
  plain = plain.intersection(CodepointSet::of(U"\"\\").complement());
  std::vector<ExprId> parts = {builder.set(set.intersection(plain))};
  constexpr std::u32string_view kEscaped = U"\"\\\b\f\n\r\t";
  constexpr std::string_view kEscapes = "\"\\bfnrt";
  CodepointSet letters;  // after the backslash
  for (size_t i = 0; i < kEscaped.size(); ++i) {
    if (set.contains(kEscaped[i]))
      letters.add(static_cast<uint8_t>(kEscapes[i]), static_cast<uint8_t>(kEscapes[i]));
  }
  if (!letters.empty()) parts.push_back(builder.sequence({builder.bytes("\\"), builder.set(letters)}));
  for (uint32_t high = 0; high < 2; ++high) {
    CodepointSet digits;
    for (uint32_t low = 0; low < 16; ++low) {
      if (!set.contains(high << 4 | low)) continue;
      if (low < 10) {
        digits.add('0' + low, '0' + low);
      } else {
        digits.add('a' + low - 10, 'a' + low - 10);
        digits.add('A' + low - 10, 'A' + low - 10);
      }
    }
    if (!digits.empty())
      parts.push_back(
          builder.sequence({builder.bytes(high == 0 ? "\\u000" : "\\u001"), builder.set(digits)}));
  }
  return builder.choice(std::move(parts));
}

ExprId nfa_expression(GrammarBuilder& builder, const CharNfa& nfa) {
  Graph graph;
  graph.num_nodes = static_cast<uint32_t>(nfa.states.size()) * 4;
  graph.start = nfa.start * 4;
  std::vector<ExprId> set_exprs;
  for (const CodepointSet& set : nfa.sets) set_exprs.push_back(builder.set(set));
  for (uint32_t s = 0; s < nfa.states.size(); ++s) {
    for (uint32_t flags = 0; flags < 4; ++flags) {
      for (const CharNfa::Edge& edge : nfa.states[s]) {
        const uint32_t from = s * 4 + flags, to = edge.target * 4;
        switch (edge.kind) {
          case CharNfa::Edge::Kind::kEmpty:
            graph.edges.push_back({from, to + flags, builder.empty()});
            break;
          case CharNfa::Edge::Kind::kAtBegin:
            if ((flags & kRead) == 0) graph.edges.push_back({from, to + flags, builder.empty()});
            break;
          case CharNfa::Edge::Kind::kAtEnd:
            graph.edges.push_back({from, to + (flags | kEnded), builder.empty()});
            break;
          case CharNfa::Edge::Kind::kSet:
            if ((flags & kEnded) == 0) graph.edges.push_back({from, to + kRead, set_exprs[edge.set]});
            break;
        }
      }
    }
  }
  for (uint32_t flags = 0; flags < 4; ++flags) graph.accepting.push_back(nfa.accept * 4 + flags);
  return builder.graph(std::move(graph));
}

}  // namespace millrace::grammar
