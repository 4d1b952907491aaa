// Batcher: a step's items become one ragged batch, and the model is set to work on it. Drafts go behind the
// token they follow, and every row of those wants logits.
#pragma once

#include <cstdint>
#include <span>

#include "base/buffer_pool.h"
#include "engine/recorder.h"
#include "engine/runtime.h"
#include "engine/step_item.h"

namespace millrace {

class Batcher {
 public:
  // max_running: sequences of a step. draft_rows: those of its rows that may be drafts.
  Batcher(Runtime& runtime, Recorder& recorder, int32_t max_running, int32_t draft_rows);

  // Launches the step and says in the items where their rows are. Does not wait.
  StepRows launch(std::span<StepItem> items, double now);

 private:
  void mark_served(Sample& sample, double now);
  Slice slice_of(const StepItem& item);

  Runtime& runtime_;
  Recorder& recorder_;
  Buffer<Slice> slices_;
  Buffer<int32_t> fed_;  // tokens and drafts of those that have drafts
};

}  // namespace millrace
