#include "engine/step_meter.h"

#include <algorithm>

#include "base/paging.h"

namespace millrace {
namespace {

// Steps of at most so many rows say what a decode step costs; larger ones are prompts.
constexpr int32_t kDecodeRows = 64;

}  // namespace

void StepMeter::record(const StepRows& rows, size_t batch, double begin, double computed) {
  // A step that was launched ahead began when the one before it ended.
  const double model_s = computed - std::max(begin, last_computed_);
  const double sample_s = recorder_.now() - computed;
  last_computed_ = computed;
  decoding_ = rows.prompts == 0;
  measure(rows, model_s);
  Recorder::add(recorder_.steps, 1);
  Recorder::add(recorder_.batch_sum, batch);
  Recorder::add(recorder_.rows_sum, static_cast<uint64_t>(rows.all));
  Recorder::add(recorder_.budget_sum, static_cast<uint64_t>(step_tokens_));
  Recorder::add(recorder_.computed_tokens, static_cast<uint64_t>(rows.all));
  Recorder::add(recorder_.busy_s, model_s);
  Recorder::add(recorder_.sample_s, sample_s);
  recorder_.step_time.add(model_s + sample_s);
  recorder_.computed_rate.add(recorder_.now(), rows.all);
}

void StepMeter::measure(const StepRows& rows, double model_s) {
  if (rows.all <= kDecodeRows) decode_cost_.add(rows.all, model_s);
  if (rows.prompts >= 2 * kBlockTokens && 2 * rows.prompts >= rows.all && model_s > 0) {
    const double rate = rows.all / model_s;
    rates_.prompt_tok_s = rates_.prompt_tok_s > 0 ? 0.8 * rates_.prompt_tok_s + 0.2 * rate : rate;
  }
}

}  // namespace millrace
