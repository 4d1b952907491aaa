#include "engine/drafting.h"

#include <algorithm>

namespace millrace {

Drafting::Drafting(SampleTable& samples, sched::Scheduler& scheduler, const StepMeter& meter,
                   std::unique_ptr<ModelDrafter> drafter, const EngineOptions& options, int32_t context,
                   int32_t draft_rows)
    : samples_(samples),
      scheduler_(scheduler),
      meter_(meter),
      drafter_(std::move(drafter)),
      options_(options),
      context_(context),
      draft_rows_(draft_rows) {
  items_.reserve(static_cast<size_t>(options.max_running));
}

void Drafting::propose() {
  if (options_.speculation == Speculation::kOff) return;
  items_.clear();
  const Costs now = costs();
  int32_t left = draft_rows_;
  for (const sched::Id id : scheduler_.running_ids()) {
    Sample& sample = samples_[id];
    sample.draft.tokens.clear();
    left -= propose_for(sample, left, now);
  }
  run_model();
  for (const sched::Id id : scheduler_.running_ids()) {
    scheduler_.want_drafts(id, static_cast<int32_t>(samples_[id].draft.tokens.size()));
  }
}

Drafting::Costs Drafting::costs() const {
  const auto batch = static_cast<double>(scheduler_.running());
  const StepCost& cost = meter_.decode_cost();
  const double step_s = cost.step_s(batch);
  return {.row = step_s > 0 ? batch * cost.row_s() / step_s : 0.3,
          .draft = drafter_ && step_s > 0 ? batch * drafter_->draft_s() / step_s : 0.0};
}

// How many drafts a sample can use: none unless it is about to compute its last token.
int32_t Drafting::max_drafts(const Sample& sample, int32_t left) const {
  const auto known = static_cast<int32_t>(sample.tokens.size());
  if (left <= 0 || sample.blocks.state() != kv::Sequence::State::kActive ||
      sample.blocks.length() + 1 != known || sample.generated() == 0) {
    return 0;
  }
  const int32_t max = std::min({options_.max_draft, left, context_ - known});
  const int32_t asked = sample.job->request.max_tokens;
  return asked > 0 ? std::min(max, asked - sample.generated() - 1) : max;
}

// Drafts from the text, or an item for the model. Returns how many rows of the step they take.
int32_t Drafting::propose_for(Sample& sample, int32_t left, const Costs& costs) {
  const int32_t max = max_drafts(sample, left);
  if (max <= 0) return 0;
  Sample::Draft& draft = sample.draft;
  if (drafter_ && !sample.job->images.empty()) return 0;  // a model that sees nothing
  if (drafter_) {
    draft.evidence = DraftLengths::kModel;
    const int32_t count = draft.lengths.of[draft.evidence].best(costs.row, costs.draft, max);
    if (count <= 0) return 0;
    items_.push_back({.sequence = &draft.blocks,
                      .tokens = sample.tokens,
                      .sampler = &sample.sampler,
                      .count = count,
                      .drafts = &draft.tokens});
    return count;
  }
  draft.evidence = draft.lookup.look(sample.tokens);
  if (draft.evidence == LookupDrafter::kNone) return 0;
  const int32_t count = draft.lengths.of[draft.evidence].best(costs.row, 0.0, max);
  draft.lookup.take(sample.tokens, count, draft.tokens);
  // What stands for an image is no token.
  const auto image = std::find_if(draft.tokens.begin(), draft.tokens.end(), [](int32_t t) { return t < 0; });
  draft.tokens.resize(static_cast<size_t>(image - draft.tokens.begin()));
  return static_cast<int32_t>(draft.tokens.size());
}

void Drafting::run_model() {
  if (items_.empty()) return;
  try {
    drafter_->propose(items_);
  } catch (...) {
    for (const ModelDrafter::Item& item : items_) item.drafts->clear();
  }
}

}  // namespace millrace
