// One answer held to a grammar: the set of configurations after what was accepted, and the mask of what may
// come next. Steps are a microsecond or two, so a clone copies the set and shares all the rest. Masks that no
// answer has needed before take up to milliseconds: another thread computes them while the model does its
// step.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "grammar/compiled_grammar.h"
#include "grammar/mask_vocabulary.h"
#include "grammar/runaway.h"
#include "grammar/stacks.h"

namespace millrace::grammar {
namespace {

class GrammarConstraint final : public TokenConstraint {
 public:
  GrammarConstraint(std::shared_ptr<const Grammar> grammar, std::shared_ptr<const Vocabulary> vocabulary,
                    std::vector<int32_t> end_tokens)
      : grammar_(std::move(grammar)),
        vocabulary_(std::move(vocabulary)),
        masks_(grammar_->masks(vocabulary_)),
        end_tokens_(std::move(end_tokens)),
        stepper_(grammar_->automaton()) {
    const Automaton& automaton = grammar_->automaton();
    stepper_.add(stacks_, {automaton.rules[automaton.root].start, 0}, set_);
    // Here, on the thread of the one who asks: the first mask is there before the engine sees the request.
    masks_->apply(automaton, *vocabulary_, stacks_, set_, {});
  }

  std::unique_ptr<TokenConstraint> clone() const override {
    return std::make_unique<GrammarConstraint>(*this);
  }

  bool allowed(std::span<uint64_t> mask) override {
    if (mask.size() < vocabulary_->num_words())
      throw_error(ErrorCode::kBadInput, "constraint: the mask has {} tokens, the vocabulary {}",
                  mask.size() * 64, vocabulary_->num_tokens());
    if (!ended_) {
      masks_->apply(grammar_->automaton(), *vocabulary_, stacks_, set_, mask);
      if (grammar_->is_json()) runaway_.narrow(*vocabulary_, mask);
    }
    if (ended_ || set_.ends) {
      for (const int32_t t : end_tokens_) {
        if (t >= 0 && static_cast<size_t>(t) < mask.size() * 64) mask[t / 64] |= uint64_t{1} << (t % 64);
      }
    }
    if (std::all_of(mask.begin(), mask.end(), [](uint64_t word) { return word == 0; }))
      throw_error(ErrorCode::kUnsupported, "constraint: the vocabulary has no token that continues the text");
    return true;
  }

  void accept(int32_t token) override {
    if (set_.ends && std::find(end_tokens_.begin(), end_tokens_.end(), token) != end_tokens_.end()) {
      ended_ = true;
      return;
    }
    const bool is_text = !ended_ && token >= 0 && static_cast<size_t>(token) < vocabulary_->num_tokens() &&
                         !vocabulary_->bytes_of(token).empty();
    if (!is_text || !read(vocabulary_->bytes_of(token)))
      throw_error(ErrorCode::kBadInput, "constraint: token {} cannot come next", token);
    if (grammar_->is_json()) runaway_.read(vocabulary_->bytes_of(token));
    if (stacks_.size() > max_nodes_) forget_unused();
    compute_ahead();
  }

 private:
  // The next mask is asked for after the model's next step: what is missing for it is computed meanwhile.
  void compute_ahead() {
    if (masks_->is_ready(stacks_, set_)) return;
    vocabulary_->background().post(
        [grammar = grammar_, vocabulary = vocabulary_.get(), masks = masks_, stacks = stacks_, set = set_] {
          masks->apply(grammar->automaton(), *vocabulary, stacks, set, {});
        });
  }

  // False, and nothing changes, if the bytes cannot come next.
  bool read(std::string_view bytes) {
    ConfigSet set = set_;
    for (const char c : bytes) {
      stepper_.expand(stacks_, set.configs, expanded_);
      stepper_.shift(stacks_, expanded_, static_cast<uint8_t>(c), next_);
      std::swap(set, next_);
      if (!set.alive()) return false;
    }
    std::swap(set_, set);
    return true;
  }

  // Copies the stacks that are still standing. A node lies below those pushed on it, so their order stays.
  void forget_unused() {
    std::vector<NodeId> new_id(stacks_.size(), 0);
    std::vector<uint8_t> is_used(stacks_.size(), 0);
    for (const Config& config : set_.configs) is_used[config.stack] = 1;
    for (NodeId node = static_cast<NodeId>(stacks_.size()); node-- > 1;) {
      if (is_used[node] == 0) continue;
      for (const StackEdge& edge : stacks_.edges(node)) is_used[edge.below] = 1;
    }
    Stacks kept;
    std::vector<StackEdge> edges;
    for (NodeId node = 1; node < stacks_.size(); ++node) {
      if (is_used[node] == 0) continue;
      edges.assign(stacks_.edges(node).begin(), stacks_.edges(node).end());
      for (StackEdge& edge : edges) edge.below = new_id[edge.below];
      std::sort(edges.begin(), edges.end());
      new_id[node] = kept.node(edges);
    }
    for (Config& config : set_.configs) config.stack = new_id[config.stack];
    stacks_ = std::move(kept);
    max_nodes_ = std::max<size_t>(kMinNodes, 2 * stacks_.size());
  }

  static constexpr size_t kMinNodes = 256;

  std::shared_ptr<const Grammar> grammar_;
  std::shared_ptr<const Vocabulary> vocabulary_;
  std::shared_ptr<MaskCache> masks_;
  std::vector<int32_t> end_tokens_;
  Stacks stacks_;
  Stepper stepper_;
  ConfigSet set_, next_;
  std::vector<Config> expanded_;
  Runaway runaway_;
  size_t max_nodes_ = kMinNodes;
  bool ended_ = false;
};

}  // namespace

std::unique_ptr<TokenConstraint> constrain(std::shared_ptr<const Grammar> grammar,
                                           std::shared_ptr<const Vocabulary> vocabulary,
                                           std::vector<int32_t> end_tokens) {
  return std::make_unique<GrammarConstraint>(std::move(grammar), std::move(vocabulary),
                                             std::move(end_tokens));
}

}  // namespace millrace::grammar
