// class Grammar: the automaton with its masks for each vocabulary it has met.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "grammar/automaton.h"
#include "grammar/grammar.h"
#include "grammar/mask_cache.h"

namespace millrace::grammar {

class Grammar {
 public:
  // `is_json`: every match is JSON, and an answer that runs on is brought to its end (runaway.h).
  explicit Grammar(Automaton automaton, bool is_json = false)
      : automaton_(std::move(automaton)), is_json_(is_json) {}
  const Automaton& automaton() const { return automaton_; }
  bool is_json() const { return is_json_; }
  // The masks for this vocabulary, kept as long as it lives.
  std::shared_ptr<MaskCache> masks(const std::shared_ptr<const Vocabulary>& vocabulary) const;
  size_t bytes() const;

 private:
  // Masks of one grammar and vocabulary: a few hundred KB for a schema of 20 fields and 200,000 tokens.
  static constexpr size_t kMaxMaskBytes = size_t{32} << 20;

  Automaton automaton_;
  bool is_json_;
  mutable std::mutex mutex_;
  mutable std::vector<std::pair<std::weak_ptr<const Vocabulary>, std::shared_ptr<MaskCache>>> masks_;
};

}  // namespace millrace::grammar
