#include "engine/batcher.h"

namespace millrace {

Batcher::Batcher(Runtime& runtime, Recorder& recorder, int32_t max_running, int32_t draft_rows)
    : runtime_(runtime), recorder_(recorder) {
  slices_.reserve(static_cast<size_t>(max_running));
  fed_.reserve(2 * static_cast<size_t>(draft_rows));
}

StepRows Batcher::launch(std::span<StepItem> items, double now) {
  slices_.clear();
  fed_.clear();
  size_t with_drafts = 0;
  for (const StepItem& item : items) {
    with_drafts += item.drafts > 0 ? static_cast<size_t>(1 + item.drafts) : 0;
  }
  fed_.reserve(with_drafts);  // the slices point into it
  StepRows rows;
  for (StepItem& item : items) {
    mark_served(*item.sample, now);
    const Slice slice = slice_of(item);
    slices_.push_back(slice);
    item.row = rows.logits;
    item.first_row = rows.all;
    if (item.sample->scores) {
      item.scored = item.tokens;
      item.row += static_cast<size_t>(item.tokens) - 1;
      rows.logits += static_cast<size_t>(item.tokens);
    } else if (slice.want != Slice::Want::kNone) {
      rows.logits += static_cast<size_t>(1 + item.drafts);
    }
    rows.all += item.tokens + item.drafts;
    if (item.tokens > 1) rows.prompts += item.tokens;
  }
  runtime_.launch(slices_);
  return rows;
}

void Batcher::mark_served(Sample& sample, double now) {
  if (sample.served) return;
  sample.served = true;
  sample.usage.queue_s = now - sample.job->arrival_s;
  recorder_.queue_time.add(sample.usage.queue_s);
  Recorder::add(recorder_.prompt_tokens, static_cast<uint64_t>(sample.usage.prompt_tokens));
}

Slice Batcher::slice_of(const StepItem& item) {
  const Sample& sample = *item.sample;
  Slice slice;
  slice.sequence = &sample.blocks;
  slice.hidden = sample.hidden.has_value();
  slice.adapter = sample.job->adapter;
  slice.sparse_pages = sample.job->sparse_pages;
  if (sample.job->request.second_text > 0) slice.second_text = sample.job->request.second_text;
  slice.fp8_until = sample.job->fp8_until;
  slice.images = sample.job->images;
  if (item.drafts > 0) {
    const size_t at = fed_.size();
    fed_.push_back(sample.tokens.back());
    fed_.insert(fed_.end(), sample.draft.tokens.begin(), sample.draft.tokens.begin() + item.drafts);
    slice.tokens = std::span(fed_).subspan(at);
    slice.want = Slice::Want::kAll;
    return slice;
  }
  slice.tokens = std::span(sample.tokens)
                     .subspan(static_cast<size_t>(sample.blocks.length()), static_cast<size_t>(item.tokens));
  slice.want = sample.scores                 ? Slice::Want::kAll
               : item.last && !sample.hidden ? Slice::Want::kLast
                                             : Slice::Want::kNone;
  return slice;
}

}  // namespace millrace
