// One step and what comes of it: drafts, the ragged batch, events. pick.cpp has how tokens are picked.
#include <algorithm>

#include "base/check.h"
#include "engine/loop.h"

namespace millrace {
namespace {

bool contains(const std::vector<int32_t>& list, int32_t token) {
  return std::find(list.begin(), list.end(), token) != list.end();
}

// Steps of at most so many rows say what a decode step costs; larger ones are prompts.
constexpr int32_t kDecodeRows = 64;

}  // namespace

// ---------------------------------------------------------------- drafts

void Loop::propose_drafts() {
  draft_items_.clear();
  const auto batch = static_cast<double>(scheduler_.running());
  const double step_s = decode_cost_.step_s(batch);
  const double row_cost = step_s > 0 ? batch * decode_cost_.row_s() / step_s : 0.3;
  const double draft_cost = drafter_ && step_s > 0 ? batch * drafter_->draft_s() / step_s : 0.0;
  int32_t left = options_.limits.draft_rows;
  for (const Id id : scheduler_.running_ids()) {
    Sample& sample = *samples_[id];
    sample.drafts.clear();
    const auto known = static_cast<int32_t>(sample.tokens.size());
    if (left <= 0 || sample.blocks.state() != kv::Sequence::State::kActive ||
        sample.blocks.length() + 1 != known || sample.generated() == 0) {
      continue;
    }
    int32_t most = std::min({options_.max_draft, left, runtime_.context() - known});
    const int32_t asked = sample.job->request.max_tokens;
    if (asked > 0) most = std::min(most, asked - sample.generated() - 1);
    if (most <= 0) continue;
    if (drafter_) {
      sample.evidence = DraftLengths::kModel;
      const int32_t count = sample.draft_lengths.of[sample.evidence].best(row_cost, draft_cost, most);
      if (count <= 0) continue;
      draft_items_.push_back({.sequence = &sample.draft_blocks,
                              .tokens = sample.tokens,
                              .sampler = &sample.sampler,
                              .count = count,
                              .drafts = &sample.drafts});
      left -= count;
    } else {
      sample.evidence = sample.lookup.look(sample.tokens);
      if (sample.evidence == LookupDrafter::kNone) continue;
      const int32_t count = sample.draft_lengths.of[sample.evidence].best(row_cost, 0.0, most);
      sample.lookup.take(sample.tokens, count, sample.drafts);
      left -= static_cast<int32_t>(sample.drafts.size());
    }
  }
  if (!draft_items_.empty()) {
    try {
      drafter_->propose(draft_items_);
    } catch (...) {
      // Drafts are a hope, not a promise: without them the step is only slower.
      for (const ModelDrafter::Item& item : draft_items_) item.drafts->clear();
    }
  }
  for (const Id id : scheduler_.running_ids()) {
    scheduler_.want_drafts(id, static_cast<int32_t>(samples_[id]->drafts.size()));
  }
}

// ---------------------------------------------------------------- the step

void Loop::step(std::span<Item> items) {
  try {
    forward(items);
  } catch (...) {
    retry(items, std::current_exception());
  }
}

// Whose fault it was shows when each runs alone. Nothing has advanced: computing it again is harmless.
void Loop::retry(std::span<Item> items, const std::exception_ptr& error) {
  forget_ahead();  // it stands on tokens that nobody got
  if (items.size() == 1 || is_of_device(error)) {
    for (const Item& item : items) fail(item.id, error);
    return;
  }
  for (Item& item : items) step({&item, 1});
}

void Loop::forward(std::span<Item> items) {
  const double begin = recorder_.now();
  const Rows rows = prepare(items, begin);
  runtime_.launch(slices_);
  const bool on_device = sample_on_device(items, rows);
  finish(items, rows, begin, on_device);
}

// The rest of a step that is launched: `on_device`, and its tokens are being picked.
void Loop::finish(std::span<Item> items, const Rows& rows, double begin, bool on_device) {
  if (on_device) go_ahead(items);
  const double waiting = recorder_.now();
  const Picks picks = wait_for(items, on_device);
  const double computed = recorder_.now();
  Recorder::add(recorder_.wait_s, computed - waiting);
  pick_all(items, picks);
  for (Item& item : items) {
    if (item.sample == nullptr || !forks(item)) continue;
    try {
      fork_samples(item, picks.logits);
    } catch (...) {
      item.sample->failure = std::current_exception();
    }
  }
  for (Item& item : items) {
    if (item.sample != nullptr) after_step(item);
  }
  // A step that was launched ahead began when the one before it ended.
  const double model_s = computed - std::max(begin, last_computed_);
  last_computed_ = computed;
  record_step(rows, items.size(), model_s, recorder_.now() - computed);
}

// The batch, in slices_.
Loop::Rows Loop::prepare(std::span<Item> items, double now) {
  slices_.clear();
  fed_.clear();
  size_t with_drafts = 0;
  for (const Item& item : items) with_drafts += item.drafts > 0 ? static_cast<size_t>(1 + item.drafts) : 0;
  fed_.reserve(with_drafts);  // the slices point into it
  Rows rows;
  for (Item& item : items) {
    Sample& sample = *item.sample;
    if (!sample.served) {
      sample.served = true;
      sample.usage.queue_s = now - sample.job->arrival_s;
      recorder_.queue_time.add(sample.usage.queue_s);
      Recorder::add(recorder_.prompt_tokens, static_cast<uint64_t>(sample.usage.prompt_tokens));
    }
    Slice slice{
        .sequence = &sample.blocks,
        .tokens = std::span(sample.tokens)
                      .subspan(static_cast<size_t>(sample.blocks.length()), static_cast<size_t>(item.tokens)),
        .want = item.last && !sample.hidden ? Slice::Want::kLast : Slice::Want::kNone};
    slice.hidden = sample.hidden.has_value();
    if (item.drafts > 0) {
      const size_t at = fed_.size();
      fed_.push_back(sample.tokens.back());
      fed_.insert(fed_.end(), sample.drafts.begin(), sample.drafts.begin() + item.drafts);
      slice.tokens = std::span(fed_).subspan(at);
      slice.want = Slice::Want::kAll;
    }
    slices_.push_back(slice);
    item.row = rows.logits;
    item.first_row = rows.all;
    rows.logits += slice.want != Slice::Want::kNone ? static_cast<size_t>(1 + item.drafts) : 0;
    rows.all += item.tokens + item.drafts;
    if (item.tokens > 1) rows.prompts += item.tokens;
  }
  return rows;
}

void Loop::record_step(const Rows& rows, size_t batch, double model_s, double sample_s) {
  if (rows.all <= kDecodeRows) decode_cost_.add(rows.all, model_s);
  if (rows.prompts >= 2 * kBlockTokens && 2 * rows.prompts >= rows.all && model_s > 0) {
    const double rate = rows.all / model_s;
    rates_.prompt_tok_s = rates_.prompt_tok_s > 0 ? 0.8 * rates_.prompt_tok_s + 0.2 * rate : rate;
  }
  Recorder::add(recorder_.steps, 1);
  Recorder::add(recorder_.batch_sum, batch);
  Recorder::add(recorder_.rows_sum, static_cast<uint64_t>(rows.all));
  Recorder::add(recorder_.budget_sum, static_cast<uint64_t>(options_.limits.step_tokens));
  Recorder::add(recorder_.computed_tokens, static_cast<uint64_t>(rows.all));
  Recorder::add(recorder_.busy_s, model_s);
  Recorder::add(recorder_.sample_s, sample_s);
  decoding_ = rows.prompts == 0;
  recorder_.step_time.add(model_s + sample_s);
  recorder_.computed_rate.add(recorder_.now(), rows.all);
}

// Adds this step's rows to an embedding; those of a prompt that is computed again are in already.
void Loop::pool_hidden(Item& item) {
  Sample& sample = *item.sample;
  HiddenPool& pool = *sample.hidden;
  sample.failure = nullptr;
  try {
    const int32_t first = sample.blocks.length(), last = first + item.tokens;
    for (; pool.next >= first && pool.next < last; ++pool.next) {
      runtime_.read_hidden(item.first_row + pool.next - first, pool.row);
      for (size_t i = 0; i < pool.row.size(); ++i) pool.sum[i] += pool.row[i];
    }
  } catch (...) {
    sample.failure = std::current_exception();
  }
}

// ---------------------------------------------------------------- after it

// The prompt is computed: the other samples share its blocks and pick their own first tokens.
void Loop::fork_samples(const Item& item, std::span<const float> logits) {
  Sample& parent = *item.sample;
  Job& job = *parent.job;
  if (parent.failure) return;  // all of them end with it
  // The children stand where the parent stands once its prompt counts.
  cache_.advance(parent.blocks,
                 std::span(parent.tokens).subspan(static_cast<size_t>(parent.blocks.length())));
  job.forked = true;
  for (int32_t i = 1; i < job.request.samples; ++i) {
    Id id = -1;
    try {
      SamplingParams params = job.request.sampling;
      params.seed = sample_seed(job.stream->seed, i);
      Sampler sampler(params, runtime_.config().vocab);
      sampler.add_prompt(job.prompt->tokens);
      auto child = std::make_unique<Sample>(parent.job, i, std::move(sampler));
      child->tokens.reserve(parent.tokens.capacity());
      child->tokens = parent.tokens;
      child->picked.reserve(parent.picked.capacity());
      child->drafts.reserve(parent.drafts.capacity());
      if (options_.speculation == Speculation::kLookup) child->lookup.reserve(parent.tokens.capacity());
      child->mask.resize(parent.mask.size());
      child->usage = parent.usage;
      child->served = true;
      child->blocks = cache_.fork(parent.blocks);
      id = new_id();
      samples_[id] = std::move(child);
      ids_of_[job.stream->id].push_back(id);
      scheduler_.fork(item.id, id);
      Item first{
          .id = id, .sample = samples_[id].get(), .tokens = 0, .drafts = 0, .last = true, .row = item.row};
      pick(first, {.sampled = {}, .logits = logits});
      after_step(first);
    } catch (...) {
      if (id >= 0) {
        fail(id, std::current_exception());
      } else {
        Event event;
        describe(event, std::current_exception());
        event.sample = i;
        job.stream->finish(std::move(event));
        --job.open;
        scheduler_.drop_sample(item.id);
      }
    }
  }
}

void Loop::after_step(Item& item) {
  Sample& sample = *item.sample;
  try {
    if (sample.failure) std::rethrow_exception(sample.failure);
    const int32_t length = sample.blocks.length();
    const auto known = static_cast<int32_t>(sample.tokens.size());
    // Drafts that were right are the first of what was picked: they are computed already.
    const int32_t right = item.last && !sample.hidden ? static_cast<int32_t>(sample.picked.size()) - 1 : 0;
    const int32_t fed = std::min(length + item.tokens, known);
    for (const SampledToken& picked : sample.picked) {
      if (item.last) sample.tokens.push_back(picked.token);
    }
    cache_.advance(sample.blocks,
                   std::span(sample.tokens)
                       .subspan(static_cast<size_t>(length), static_cast<size_t>(fed + right - length)));
    if (item.drafts > 0) {
      sample.draft_lengths.of[sample.evidence].add(item.drafts, right);
      sample.usage.drafted_tokens += item.drafts;
      sample.usage.accepted_tokens += right;
      Recorder::add(recorder_.drafted, static_cast<uint64_t>(item.drafts));
      Recorder::add(recorder_.accepted, static_cast<uint64_t>(right));
    }
    if (item.last && sample.hidden) {
      deliver_embedding(item.id, sample);
      return;
    }
    if (item.last) {
      for (size_t i = 0; i < sample.picked.size(); ++i) {
        if (deliver(item.id, sample, sample.picked[i], fed + static_cast<int32_t>(i))) return;
      }
    }
    scheduler_.update(item.id, sample.blocks.length(), static_cast<int32_t>(sample.tokens.size()));
  } catch (...) {
    fail(item.id, std::current_exception());
  }
}

void Loop::deliver_embedding(Id id, const Sample& sample) {
  MILLRACE_CHECK(sample.hidden->next == sample.prompt_tokens());
  Event event;
  event.kind = Event::Kind::kFinished;
  event.finish = FinishReason::kEmbedded;
  event.embedding = sample.hidden->mean();
  runtime_.check_logits(event.embedding);
  end_sample(id, std::move(event));
}

// Tells the client of one token; `fed` tokens came before it. True when it was the last.
bool Loop::deliver(Id id, Sample& sample, const SampledToken& token, int32_t fed) {
  const Job& job = *sample.job;
  const double now = recorder_.now();
  ++sample.usage.generated_tokens;
  Recorder::add(recorder_.generated_tokens, 1);
  recorder_.generated_rate.add(now, 1);
  if (sample.usage.generated_tokens == 1) {
    sample.usage.first_token_s = now - job.arrival_s;
    recorder_.first_token.add(sample.usage.first_token_s);
  } else {
    recorder_.inter_token.add(now - sample.last_token_s);
  }
  sample.last_token_s = now;

  const bool end_token = contains(job.end_tokens, token.token);
  Event event;
  event.kind = Event::Kind::kToken;
  event.sample = sample.index;
  event.token = token.token;
  event.logprob = token.logprob;
  event.top = token.top;
  if (!end_token) event.text = sample.text.push(token.token);
  if (sample.usage.generated_tokens == 1) event.usage = sample.usage;
  job.stream->push(std::move(event));

  const int32_t asked = job.request.max_tokens;
  if (end_token) {
    end(id, FinishReason::kEndToken);
  } else if (sample.text.stopped()) {
    end(id, FinishReason::kStopString);
  } else if (asked > 0 && sample.usage.generated_tokens >= asked) {
    end(id, FinishReason::kMaxTokens);
  } else if (fed >= runtime_.context()) {
    end(id, FinishReason::kContext);
  } else {
    return false;
  }
  return true;
}

}  // namespace millrace
