// StepMeter: how long steps take. It feeds the statistics, and the two who plan by measured time: the
// scheduler (tokens of a prompt per second) and drafting (what one more row costs).
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/drafter.h"
#include "engine/recorder.h"
#include "engine/step_item.h"
#include "sched/scheduler.h"

namespace millrace {

class StepMeter {
 public:
  // step_tokens: rows that a step may have.
  StepMeter(Recorder& recorder, int32_t step_tokens) : recorder_(recorder), step_tokens_(step_tokens) {}

  // A step of `batch` sequences that was launched at `begin` and whose logits or tokens were there at
  // `computed`; by now the tokens are delivered.
  void record(const StepRows& rows, size_t batch, double begin, double computed);

  const sched::Rates& rates() const { return rates_; }
  const StepCost& decode_cost() const { return decode_cost_; }
  bool decoding() const { return decoding_; }  // the last step had no prompts

 private:
  void measure(const StepRows& rows, double model_s);

  Recorder& recorder_;
  const int32_t step_tokens_;
  sched::Rates rates_;
  StepCost decode_cost_;
  double last_computed_ = 0;
  bool decoding_ = false;
};

}  // namespace millrace
