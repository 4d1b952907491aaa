// One step as plain data: an item for each sequence that takes part, and how many rows they have together.
// The planner makes the items, the batcher numbers their rows, the picker and the committer read them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/sample_table.h"

namespace millrace {

struct StepItem {  // one sequence's part of a step
  SampleTable::Id id = -1;
  uint32_t life = 0;         // of the id: who takes a step over later sees by it that the sample has ended
  Sample* sample = nullptr;  // null: it has ended, nobody reads its rows
  int32_t tokens = 0;        // known ones to compute
  int32_t drafts = 0;        // and so many drafts behind them
  bool last = false;         // all that is known is computed then: a token can be picked
  size_t row = 0;            // of the logits its first token is picked from
  int32_t scored = 0;        // rows up to that one and with it that logprobs of the prompt come from
  int32_t first_row = 0;     // of its tokens in the batch
  bool masked = false;       // sample->mask says which tokens are allowed now

  // The prompt is computed and the other samples of its request are to share it.
  bool forks() const { return last && sample->job->request.samples > 1 && !sample->job->forked; }
};

struct StepRows {
  int32_t all = 0, prompts = 0;
  size_t logits = 0;
};

}  // namespace millrace
