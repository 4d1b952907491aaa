// Holds an answer to a plan: literal tokens to choose from, free text up to a control token, text under a
// grammar, in any order. Formats say in a plan what their answers look like around the grammars; the plan is
// made once per request and shared between its samples.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "chat/chat_codec.h"
#include "grammar/grammar.h"
#include "millrace/sampling.h"

namespace millrace::chat {

// Where constraints over text come from: src/grammar with the model's vocabulary.
class Grammars {
 public:
  virtual ~Grammars() = default;
  virtual std::unique_ptr<TokenConstraint> constrain(std::shared_ptr<const grammar::Grammar> grammar,
                                                     std::vector<int32_t> end_tokens) const = 0;
  // Throw Error as grammar::compile_json_schema does.
  virtual std::shared_ptr<const grammar::Grammar> json_schema(std::string_view schema,
                                                              grammar::Objects objects) const = 0;
  virtual std::shared_ptr<const grammar::Grammar> json_object() const = 0;
  virtual std::shared_ptr<const grammar::Grammar> regex(std::string_view pattern) const = 0;
};

// A model that calls tools over and over is stopped after so many more than one.
inline constexpr int kMaxAgain = 31;

// Nodes are numbered in the order they were added; the first is where an answer begins.
class Plan {
 public:
  struct Way {
    std::vector<int32_t> tokens = {};  // at least one; they come one after the other
    int next = 0;
    bool again = false;  // leads back to a node that was there before: kMaxAgain times in an answer
  };
  struct Node {
    // Exactly one of these four.
    std::vector<Way> ways = {};            // one of these token sequences
    std::vector<uint64_t> free_mask = {};  // any of these tokens, until one of `exits` or `exit_text`
    std::shared_ptr<const TokenConstraint> grammar = {};  // text under a grammar, until it ends
    bool done = false;                                    // the answer is over

    std::vector<std::pair<int32_t, int>> exits = {};  // of free text: this token leads to that node
    std::string exit_text = {};                       // of free text: behind it `next` begins
    int32_t grammar_end = -1;                         // the token that the grammar was told to end with
    int next = 0;                                     // behind a grammar or exit_text; must be `ways` or free
    int instead = -1;  // of a grammar: a node of `ways` that may come in its place; -1: none
  };
  int add(Node node) {
    nodes_.push_back(std::move(node));
    return static_cast<int>(nodes_.size()) - 1;
  }
  Node& node(int index) { return nodes_[static_cast<size_t>(index)]; }
  const Node& node(int index) const { return nodes_[static_cast<size_t>(index)]; }

 private:
  std::vector<Node> nodes_;
};

// All tokens that are text (no control token), as a mask of the vocabulary.
std::vector<uint64_t> text_mask(const Codec& codec);
void set_bit(std::span<uint64_t> mask, int32_t token, bool value = true);
bool test_bit(std::span<const uint64_t> mask, int32_t token);

// `codec` gives tokens their text where the plan has an exit_text.
std::shared_ptr<const TokenConstraint> make_plan_constraint(std::shared_ptr<const Plan> plan,
                                                            std::shared_ptr<const Codec> codec);

}  // namespace millrace::chat
