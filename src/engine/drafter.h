// Drafts: guesses at a sequence's next tokens, checked by the model in one step. A guess is kept exactly when
// it is the token the sampler picks there anyway, so tokens are the same with and without drafts, whoever
// made them and however many. (For a guess without a distribution of its own this is the rejection rule:
// x is kept with probability p(x), and what replaces it is distributed as p without x.)
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/buffer_pool.h"
#include "engine/runtime.h"
#include "sample/sampler.h"

namespace millrace {

// What followed the same few tokens the last time they came, the longest agreement first; and, where a copy
// was left for a moment (a word was changed), what it would go on with.
class LookupDrafter {
 public:
  // What speaks for a guess. How often it is right differs between them, and is to be followed apart.
  enum Evidence : uint8_t {
    k24Agree,  // the last tokens, with those before what is continued
    k12Agree,
    k6Agree,
    k3Agree,
    kResumed,  // the text that drafts came from goes on behind a token that differed
    k2Agree,
    kNone,
  };
  // Room for a sequence of `capacity` tokens; nothing allocates after this.
  void reserve(size_t capacity);
  // Looks for what may follow `tokens`, which only ever grow from call to call.
  Evidence look(std::span<const int32_t> tokens);
  // Guesses, as many as asked for, at what follows the tokens of the last look(); none without evidence.
  void take(std::span<const int32_t> tokens, int32_t count, Buffer<int32_t>& drafts) const;

 private:
  static constexpr std::array<int, 4> kOrders = {12, 6, 3, 2};
  struct Table {
    Buffer<int32_t> after;  // hash of the last tokens -> where what followed them begins; 0: nowhere
  };
  int32_t find(const Table& table, std::span<const int32_t> tokens, int order) const;
  void learn(std::span<const int32_t> tokens);

  std::array<Table, kOrders.size()> tables_;
  size_t learned_ = 0;            // tokens whose predecessors are in the tables
  int32_t from_ = 0;              // where the guesses of the last look() begin; 0: there are none
  int32_t copy_ = 0, ahead_ = 0;  // a copy of text: token copy_ + i came, or was to come, at ahead_ + i
};

// How often a sequence's drafts were right, and how many to ask for.
class DraftLength {
 public:
  explicit DraftLength(double expected = 0.75) : right_(4 * expected), wrong_(4 * (1 - expected)) {}
  void add(int32_t drafted, int32_t accepted);
  // The number for which expected tokens per expected time are most. row_cost: one more row in a step,
  // draft_cost: making one draft, both in units of a step without drafts.
  int32_t best(double row_cost, double draft_cost, int32_t max_drafts) const;
  double acceptance() const { return right_ / (right_ + wrong_); }

 private:
  double right_, wrong_;         // decayed counts; the start is a guess of four drafts' weight
  mutable int32_t refused_ = 0;  // in a row
};

// One for each evidence, and one for a draft model.
struct DraftLengths {
  static constexpr size_t kModel = LookupDrafter::kNone;
  std::array<DraftLength, kModel + 1> of = {DraftLength(0.98), DraftLength(0.95), DraftLength(0.9),
                                            DraftLength(0.75), DraftLength(0.6),  DraftLength(0.5),
                                            DraftLength(0.75)};
};

// How long a step takes by its rows: a line through the recent ones.
class StepCost {
 public:
  void add(double rows, double seconds);
  double row_s() const;              // one row more
  double step_s(double rows) const;  // 0 before anything was measured

 private:
  double n_ = 0, x_ = 0, y_ = 0, xx_ = 0, xy_ = 0;
};

// A small model of the same vocabulary, run one token ahead after another. It draws with the target's own
// sampler state (a copy), so that where the two models agree they pick the same token.
class ModelDrafter {
 public:
  ModelDrafter(std::unique_ptr<Runtime> runtime, int32_t target_vocab);

  struct Item {
    kv::Sequence* sequence;           // of the draft model; empty at first
    std::span<const int32_t> tokens;  // all the target knows
    const Sampler* sampler;
    int32_t count;
    Buffer<int32_t>* drafts;
  };
  // Fills the items' drafts; one whose sequence finds no space gets none.
  void propose(std::span<Item> items);
  double draft_s() const { return draft_s_; }  // of one draft of one sequence, measured

 private:
  bool catch_up(Item& item);

  std::unique_ptr<Runtime> runtime_;
  std::vector<Sampler> samplers_;
  std::vector<Slice> slices_;
  std::vector<Item*> live_;
  double draft_s_ = 0;
};

}  // namespace millrace
