// Picker: how a step's tokens are picked: on a device that samples, so that only ids cross the bus, or here
// from the logits. What a sample gets lies in Sample::picked, what went wrong in Sample::failure; nothing
// here changes a sequence.
#pragma once

#include <cstdint>
#include <span>

#include "base/buffer_pool.h"
#include "engine/runtime.h"
#include "engine/step_item.h"

namespace millrace {

struct Picks {                          // what tokens are picked from
  std::span<const SampledRow> sampled;  // by the device; empty: it does not
  std::span<const int32_t> left;        // rows that the device did not pick from
  std::span<const float> logits;        // [logit rows, vocabulary], of those rows or of all
};

class Picker {
 public:
  explicit Picker(Runtime& runtime);

  // What the device is told of a row: the draw after `ahead` others.
  static SampleRow device_row(const Sampler& sampler, int32_t ahead);
  // May the device pick for this item? What a draft's row is picked from depends on the drafts before it
  // where there are penalties or a grammar; and forks want the logits.
  static bool device_may_pick(const StepItem& item);

  // The step is launched: the device begins to pick. False: it leaves that to pick_all().
  bool start(std::span<StepItem> items, const StepRows& rows);
  // Waits for what it picked, and for the logits of the rows it left.
  Picks wait(std::span<const StepItem> items, bool on_device);
  // Everybody picks at the same time; what is wrong with one is kept for later. Embeddings take their rows.
  void pick_all(std::span<StepItem> items, const Picks& picks);
  // The tokens that follow: one, and one more for every draft that was right. Any thread.
  void pick(StepItem& item, const Picks& picks) const;

 private:
  void make_masks(std::span<StepItem> items);
  SampledToken pick_row(const StepItem& item, size_t row, const Picks& picks) const;
  void pool_hidden(StepItem& item) const;
  void score_prompt(StepItem& item, const Picks& picks) const;
  // body(first, last) over all items, by several threads when `worth` rows are enough for them.
  template <class Body>
  void for_items(std::span<StepItem> items, size_t worth, const Body& body);

  // Is the likeliest token all that anybody wants to know?
  static bool all_greedy(std::span<const StepItem> items);
  std::span<const SampledRow> greedy_rows();

  Runtime& runtime_;
  Buffer<SampledRow> greedy_;
  Buffer<SampleRow> rows_;
  Buffer<int32_t> left_;
};

}  // namespace millrace
