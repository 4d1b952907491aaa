#include "chat/plan_constraint.h"

#include <algorithm>

namespace millrace::chat {

void set_bit(std::span<uint64_t> mask, int32_t token, bool value) {
  const size_t word = static_cast<size_t>(token) / 64;
  if (token < 0 || word >= mask.size()) return;
  const uint64_t bit = uint64_t{1} << (token % 64);
  mask[word] = value ? mask[word] | bit : mask[word] & ~bit;
}

bool test_bit(std::span<const uint64_t> mask, int32_t token) {
  const size_t word = static_cast<size_t>(token) / 64;
  return token >= 0 && word < mask.size() && (mask[word] >> (token % 64) & 1) != 0;
}

std::vector<uint64_t> text_mask(const Codec& codec) {
  std::vector<uint64_t> mask((static_cast<size_t>(codec.vocab()) + 63) / 64);
  for (int32_t token = 0; token < codec.vocab(); ++token) {
    if (!codec.is_special(token) && !codec.token_text(token).empty()) set_bit(mask, token);
  }
  return mask;
}

namespace {

class PlanConstraint : public TokenConstraint {
 public:
  PlanConstraint(std::shared_ptr<const Plan> plan, std::shared_ptr<const Codec> codec)
      : plan_(std::move(plan)), codec_(std::move(codec)) {
    enter(0);
  }
  PlanConstraint(const PlanConstraint& other)
      : plan_(other.plan_),
        codec_(other.codec_),
        at_(other.at_),
        taken_(other.taken_),
        inner_(other.inner_ ? other.inner_->clone() : nullptr),
        num_again_(other.num_again_),
        tail_(other.tail_),
        can_leave_(other.can_leave_),
        lost_(other.lost_) {}

  std::unique_ptr<TokenConstraint> clone() const override { return std::make_unique<PlanConstraint>(*this); }

  bool allowed(std::span<uint64_t> mask) override {
    const Plan::Node& node = plan_->node(at_);
    if (lost_ || node.done) return false;
    if (!node.grammar) {
      add_node(node, taken_, mask);
      return true;
    }
    if (!inner_->allowed(mask)) return false;
    can_leave_ = test_bit(mask, node.grammar_end) || (taken_.empty() && node.instead >= 0);
    if (test_bit(mask, node.grammar_end)) {
      set_bit(mask, node.grammar_end, false);
      add_node(plan_->node(node.next), {}, mask);
    }
    if (taken_.empty() && node.instead >= 0) add_node(plan_->node(node.instead), {}, mask);
    return true;
  }

  void accept(int32_t token) override {
    const Plan::Node& node = plan_->node(at_);
    if (lost_ || node.done) return;
    if (node.grammar) {
      accept_in_grammar(node, token);
    } else if (!node.ways.empty()) {
      accept_in_ways(node, token);
    } else {
      accept_in_free(node, token);
    }
  }

 private:
  void enter(int index) {
    at_ = index;
    taken_.clear();
    tail_.clear();
    can_leave_ = true;
    const Plan::Node& node = plan_->node(index);
    inner_ = node.grammar ? node.grammar->clone() : nullptr;
  }

  bool is_open(const Plan::Way& way) const { return !way.again || num_again_ < kMaxAgain; }

  // What may follow the tokens `taken` of a node of ways, or any text of a free one.
  void add_node(const Plan::Node& node, const std::vector<int32_t>& taken, std::span<uint64_t> mask) const {
    for (const Plan::Way& way : node.ways) {
      if (is_open(way) && way.tokens.size() > taken.size() &&
          std::equal(taken.begin(), taken.end(), way.tokens.begin())) {
        set_bit(mask, way.tokens[taken.size()]);
      }
    }
    for (size_t i = 0; i < std::min(mask.size(), node.free_mask.size()); ++i) mask[i] |= node.free_mask[i];
    for (const auto& [token, next] : node.exits) set_bit(mask, token);
  }

  void accept_in_ways(const Plan::Node& node, int32_t token) {
    taken_.push_back(token);
    bool goes_on = false;
    for (const Plan::Way& way : node.ways) {
      if (!is_open(way)) continue;
      if (way.tokens == taken_) {
        num_again_ += way.again ? 1 : 0;
        enter(way.next);
        return;
      }
      goes_on |=
          way.tokens.size() > taken_.size() && std::equal(taken_.begin(), taken_.end(), way.tokens.begin());
    }
    lost_ = !goes_on;
  }

  void accept_in_free(const Plan::Node& node, int32_t token) {
    for (const auto& [exit, next] : node.exits) {
      if (token == exit) {
        enter(next);
        return;
      }
    }
    if (node.exit_text.empty()) return;
    tail_ += codec_->token_text(token);
    if (tail_.find(node.exit_text) != std::string::npos) {
      enter(node.next);
    } else if (tail_.size() > node.exit_text.size()) {
      tail_.erase(0, tail_.size() - node.exit_text.size());
    }
  }

  // The grammar's own text comes before what may stand in its place or follow it.
  void accept_in_grammar(const Plan::Node& node, int32_t token) {
    if (!can_leave_) {
      taken_ = {token};
      inner_->accept(token);
      return;
    }
    scratch_.assign((static_cast<size_t>(codec_->vocab()) + 63) / 64, 0);
    const bool all = !inner_->allowed(scratch_);
    if (all || (token != node.grammar_end && test_bit(scratch_, token))) {
      taken_ = {token};
      inner_->accept(token);
      return;
    }
    // Where no text is a match too, both what follows it and what stands in its place may come.
    int next = taken_.empty() ? node.instead : -1;
    if (test_bit(scratch_, node.grammar_end)) {
      scratch_.assign(scratch_.size(), 0);
      add_node(plan_->node(node.next), {}, scratch_);
      if (test_bit(scratch_, token)) next = node.next;
    }
    if (next < 0) {
      lost_ = true;
      return;
    }
    enter(next);
    accept(token);
  }

  std::shared_ptr<const Plan> plan_;
  std::shared_ptr<const Codec> codec_;
  int at_ = 0;
  std::vector<int32_t> taken_;  // of ways: tokens so far; of a grammar: not empty once it has begun
  std::unique_ptr<TokenConstraint> inner_;
  int num_again_ = 0;      // ways taken that lead back
  std::string tail_;       // of free text: the end of it, for exit_text
  bool can_leave_ = true;  // of a grammar: the next token may be none of its own
  bool lost_ = false;      // a token came that was not allowed: nothing is held from here
  std::vector<uint64_t> scratch_;
};

}  // namespace

std::shared_ptr<const TokenConstraint> make_plan_constraint(std::shared_ptr<const Plan> plan,
                                                            std::shared_ptr<const Codec> codec) {
  return std::make_shared<PlanConstraint>(std::move(plan), std::move(codec));
}

}  // namespace millrace::chat
