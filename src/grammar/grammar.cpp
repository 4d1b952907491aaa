#include "grammar/grammar.h"

#include <algorithm>

#include "base/error.h"
#include "grammar/compiled_grammar.h"
#include "grammar/stacks.h"

namespace millrace::grammar {
namespace {

// The set after reading `text`, dead if no match begins so.
ConfigSet read(const Automaton& automaton, std::string_view text) {
  Stacks stacks;
  Stepper stepper(automaton);
  ConfigSet set, next;
  std::vector<Config> expanded;
  stepper.add(stacks, {automaton.rules[automaton.root].start, 0}, set);
  for (const char c : text) {
    stepper.expand(stacks, set.configs, expanded);
    stepper.shift(stacks, expanded, static_cast<uint8_t>(c), next);
    std::swap(set, next);
    if (!set.alive()) break;
  }
  return set;
}

}  // namespace

std::shared_ptr<MaskCache> Grammar::masks(const std::shared_ptr<const Vocabulary>& vocabulary) const {
  const std::scoped_lock lock(mutex_);
  std::erase_if(masks_, [](const auto& entry) { return entry.first.expired(); });
  for (const auto& [known, masks] : masks_) {
    if (known.lock() == vocabulary) return masks;
  }
  masks_.emplace_back(vocabulary, std::make_shared<MaskCache>(kMaxMaskBytes));
  return masks_.back().second;
}

size_t Grammar::bytes() const {
  const std::scoped_lock lock(mutex_);
  size_t total = automaton_.bytes();
  for (const auto& entry : masks_) total += entry.second->bytes();
  return total;
}

bool matches(const Grammar& grammar, std::string_view text) { return read(grammar.automaton(), text).ends; }

bool matches_beginning(const Grammar& grammar, std::string_view text) {
  return read(grammar.automaton(), text).alive();
}

std::shared_ptr<const Grammar> GrammarCache::get(Kind kind, std::string_view text) {
  Key key{kind, kind == Kind::kJsonObject ? std::string() : std::string(text)};
  {
    const std::scoped_lock lock(mutex_);
    if (const auto it = index_.find(key); it != index_.end()) {
      entries_.splice(entries_.begin(), entries_, it->second);
      return it->second->grammar;
    }
  }
  std::shared_ptr<const Grammar> grammar;
  switch (kind) {
    case Kind::kJsonObject:
      grammar = compile_json_object();
      break;
    case Kind::kJsonSchema:
      grammar = compile_json_schema(text);
      break;
    case Kind::kOpenJsonSchema:
      grammar = compile_json_schema(text, Objects::kOpen);
      break;
    case Kind::kStrictJsonSchema:
      grammar = compile_json_schema(text, Objects::kStrict);
      break;
    case Kind::kRegex:
      grammar = compile_regex(text);
      break;
    case Kind::kGbnf:
      grammar = compile_gbnf(text);
      break;
  }
  const std::scoped_lock lock(mutex_);
  if (const auto it = index_.find(key); it != index_.end()) return it->second->grammar;
  entries_.push_front({key, grammar});
  index_.emplace(std::move(key), entries_.begin());
  while (entries_.size() > 1 && (entries_.size() > max_grammars_ || bytes() > max_bytes_)) {
    index_.erase(entries_.back().key);
    entries_.pop_back();
  }
  return grammar;
}

size_t GrammarCache::size() const {
  const std::scoped_lock lock(mutex_);
  return entries_.size();
}

size_t GrammarCache::bytes() const {
  size_t total = 0;
  for (const Entry& entry : entries_) total += entry.key.second.size() + entry.grammar->bytes();
  return total;
}

}  // namespace millrace::grammar
