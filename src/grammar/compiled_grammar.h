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
  explicit Grammar(Automaton automaton) : automaton_(std::move(automaton)) {}
  const Automaton& automaton() const { return automaton_; }
  // The masks for this vocabulary, kept as long as it lives.
  std::shared_ptr<MaskCache> masks(const std::shared_ptr<const Vocabulary>& vocabulary) const;
  size_t bytes() const;

 private:
  // Masks of one grammar and vocabulary: a few hundred KB for a schema of 20 fields and 200,000 tokens.
  static constexpr size_t kMaxMaskBytes = size_t{32} << 20;

  Automaton automaton_;
  mutable std::mutex mutex_;
  mutable std::vector<std::pair<std::weak_ptr<const Vocabulary>, std::shared_ptr<MaskCache>>> masks_;
};

}  // namespace millrace::grammar
