#include "sched/scheduler.h"

#include <algorithm>

#include "base/check.h"

namespace millrace::sched {
namespace {

// A prompt that starts needs a rate before one is measured; any machine reaches this.
constexpr double kSlowestPromptRate = 50.0;

// Levels by which a running sequence must be below a waiting one to give way to it: less would have equals
// take turns, and each turn costs.
constexpr double kPreemptBelow = 1.0 - 1e-9;

}  // namespace

Scheduler::Scheduler(const Limits& limits) : limits_(limits) {
  limits_.max_running = std::min({limits.max_running, limits.step_tokens, limits.logit_rows});
  MILLRACE_CHECK(limits_.max_running > 0 && limits.groups > 0 && limits.groups <= kMaxKvCounts);
  const auto max_running = static_cast<size_t>(limits_.max_running);
  running_.reserve(max_running);
  plan_.work.reserve(max_running);
  plan_.started.reserve(max_running);
  plan_.preempted.reserve(max_running);
}

void Scheduler::reserve(Id count) {
  const auto size = static_cast<size_t>(count);
  if (size <= entries_.size()) return;
  const size_t grown = std::max(size, 2 * entries_.size());
  // A heap may hold one stale item for each that is still good.
  waiting_.reserve(2 * grown);
  due_.reserve(2 * grown);
  doomed_.reserve(grown);
  plan_.cancelled.reserve(grown);
  plan_.expired.reserve(grown);
  entries_.resize(grown);
}

// Orders of the two heaps, the best on top.
bool Scheduler::served_after(const Waiting& a, const Waiting& b) {
  return a.key != b.key ? a.key < b.key : a.id > b.id;
}
bool Scheduler::due_after(const Due& a, const Due& b) { return a.time > b.time; }

// ---------------------------------------------------------------- what changes between plans

bool Scheduler::before(Id a, Id b) const {
  const double x = entries_[a].key, y = entries_[b].key;
  return x != y ? x > y : a < b;
}

void Scheduler::insert_running(Id id) {
  const auto at =
      std::upper_bound(running_.begin(), running_.end(), id, [&](Id a, Id b) { return before(a, b); });
  running_.insert(at, id);
}

void Scheduler::push_waiting(Id id) {
  Entry& e = entries_[id];
  e.state = State::kWaiting;
  waiting_.push_back({e.key, id, e.life});
  std::push_heap(waiting_.begin(), waiting_.end(), served_after);
  ++waiting_count_;
}

void Scheduler::add(Id id, const Arrival& arrival) {
  reserve(id + 1);
  Entry& e = entries_[id];
  MILLRACE_CHECK(e.state == State::kNone && arrival.tokens > 0 && arrival.samples > 0);
  const uint32_t life = e.life;
  e = {};
  e.life = life;
  e.key = arrival.priority - limits_.ageing * arrival.time;
  e.deadline = arrival.deadline;
  e.priority = arrival.priority;
  e.samples = arrival.samples;
  e.known = arrival.tokens;
  push_waiting(id);
  if (arrival.deadline != kNever) {
    due_.push_back({arrival.deadline, id, life});
    std::push_heap(due_.begin(), due_.end(), due_after);
  }
}

void Scheduler::cancel(Id id) {
  if (id < 0 || id >= static_cast<Id>(entries_.size())) return;
  Entry& e = entries_[id];
  if (e.state == State::kNone || e.cancelled) return;
  e.cancelled = true;
  doomed_.push_back(id);
}

void Scheduler::fork(Id parent, Id child) {
  reserve(child + 1);
  Entry& p = entries_[parent];
  Entry& c = entries_[child];
  MILLRACE_CHECK(p.state == State::kRunning && p.samples > 1 && c.state == State::kNone);
  const uint32_t life = c.life;
  c = p;
  c.life = life;
  c.samples = 1;
  c.drafts = 0;
  --p.samples;
  insert_running(child);
  if (c.deadline != kNever) {
    due_.push_back({c.deadline, child, life});
    std::push_heap(due_.begin(), due_.end(), due_after);
  }
}

void Scheduler::drop_sample(Id parent) {
  MILLRACE_CHECK(entries_[parent].state == State::kRunning && entries_[parent].samples > 1);
  --entries_[parent].samples;
  --slots_;
}

// Takes it out of everything; heap items of it become stale.
void Scheduler::forget(Id id) {
  Entry& e = entries_[id];
  if (e.state == State::kRunning || e.state == State::kLoading) {
    running_.erase(std::find(running_.begin(), running_.end(), id));
    slots_ -= e.samples;
  } else {
    --waiting_count_;
    if (e.swapped) --swapped_count_;
  }
  e.state = State::kNone;
  ++e.life;
}

void Scheduler::finish(Id id) {
  Entry& e = entries_[id];
  if (e.state == State::kNone) return;
  if (e.cancelled) doomed_.erase(std::find(doomed_.begin(), doomed_.end(), id));
  forget(id);
}

void Scheduler::update(Id id, int32_t computed, int32_t known) {
  Entry& e = entries_[id];
  MILLRACE_CHECK(e.state == State::kRunning && computed < known);
  e.computed = computed;
  e.known = known;
  e.drafts = 0;
}

void Scheduler::want_drafts(Id id, int32_t drafts) { entries_[id].drafts = drafts; }

void Scheduler::stands_at(Id id, int32_t computed, bool loading) {
  Entry& e = entries_[id];
  MILLRACE_CHECK((e.state == State::kLoading || e.state == State::kRunning) && computed < e.known);
  e.computed = computed;
  e.state = loading ? State::kLoading : State::kRunning;
}

Id Scheduler::first_waiting() {
  drop_stale();
  return waiting_.empty() ? -1 : waiting_.front().id;
}

void Scheduler::not_swapped(Id id) {
  Entry& e = entries_[id];
  MILLRACE_CHECK(e.state == State::kWaiting && e.swapped);
  e.swapped = false;
  e.computed = 0;
  --swapped_count_;
}

void Scheduler::start_over(Id id) {
  Entry& e = entries_[id];
  MILLRACE_CHECK(e.state != State::kNone);
  e.computed = e.drafts = 0;
  if (e.state == State::kWaiting) {
    if (e.swapped) --swapped_count_;
    e.swapped = false;
    return;
  }
  running_.erase(std::find(running_.begin(), running_.end(), id));
  slots_ -= e.samples;
  push_waiting(id);
}

double Scheduler::next_deadline() const {
  // A stale item on top only makes the caller look once more than needed.
  return due_.empty() ? kNever : due_.front().time;
}

// ---------------------------------------------------------------- blocks

bool Scheduler::fits(const Counts& need, int32_t headroom) const {
  for (int g = 0; g < limits_.groups; ++g) {
    if (need[g] + headroom > left_[g]) return false;
  }
  return true;
}

void Scheduler::take(const Counts& need) {
  for (int g = 0; g < limits_.groups; ++g) left_[g] -= need[g];
}

void Scheduler::give(const Counts& freed) {
  for (int g = 0; g < limits_.groups; ++g) left_[g] += freed[g];
}

// ---------------------------------------------------------------- one plan

void Scheduler::clear_plan() {
  plan_.cancelled.clear();
  plan_.expired.clear();
  plan_.preempted.clear();
  plan_.started.clear();
  plan_.work.clear();
}

// `memory` gets back what they held; null: nobody holds anything.
void Scheduler::end_those_due(double now, const Memory* memory) {
  const auto end = [&](Id id, std::vector<Id>& list) {
    const Entry& e = entries_[id];
    const bool holds = e.state == State::kRunning || e.state == State::kLoading;
    if (holds && memory != nullptr) give(memory->freed_by(id));
    forget(id);
    list.push_back(id);
  };
  for (const Id id : doomed_) end(id, plan_.cancelled);
  doomed_.clear();
  while (!due_.empty() && due_.front().time <= now) {
    const Due due = due_.front();
    std::pop_heap(due_.begin(), due_.end(), due_after);
    due_.pop_back();
    if (entries_[due.id].life == due.life) end(due.id, plan_.expired);
  }
}

const Plan& Scheduler::plan_ends(double now) {
  clear_plan();
  plan_.started_work = 0;
  plan_.rows = 0;
  end_those_due(now, nullptr);
  return plan_;
}

const Plan& Scheduler::plan(double now, const Memory& memory, const Rates& rates) {
  clear_plan();
  for (int g = 0; g < limits_.groups; ++g) left_[g] = memory.available(g);
  rows_left_ = limits_.step_tokens;
  logits_left_ = limits_.logit_rows;

  end_those_due(now, &memory);
  plan_running(memory, rates);
  const bool others_wait = !plan_.work.empty();
  plan_drafts(memory);
  prompt_left_ = rows_left_;
  if (others_wait && rates.prompt_tok_s > 0 && !limits_.whole_prompts) {
    const double chunk = rates.prompt_tok_s * limits_.chunk_s;
    // A step may always be doubled: else a large batch, slower than chunk_s by itself, would hardly grow and
    // never be filled.
    const int32_t least = std::max(kBlockTokens, limits_.step_tokens - rows_left_);
    if (chunk < prompt_left_) {
      prompt_left_ = std::min(prompt_left_, std::max(least, static_cast<int32_t>(chunk)));
    }
  }
  plan_prompts(memory, rates);
  plan_.started_work = 0;
  plan_starts(memory, rates);
  plan_.rows = limits_.step_tokens - rows_left_;
  for (const Plan::Preemption& p : plan_.preempted) entries_[p.id].preempted = false;
  for (const Plan::Start& s : plan_.started) entries_[s.id].started = false;
  return plan_;
}

void Scheduler::preempt(Id id, const Memory& memory, const Rates& rates) {
  Entry& e = entries_[id];
  const double rate = rates.prompt_tok_s > 0 ? rates.prompt_tok_s : kSlowestPromptRate;
  const bool swap = e.state == State::kRunning && memory.swap_seconds(id) < e.computed / rate;
  give(memory.freed_by(id));
  // Work planned for it is taken back.
  const auto work =
      std::find_if(plan_.work.begin(), plan_.work.end(), [&](const Work& w) { return w.id == id; });
  if (work != plan_.work.end()) {
    give(memory.to_grow(id, work->tokens + work->drafts));
    rows_left_ += work->tokens + work->drafts;
    if (work->last) logits_left_ += 1 + work->drafts;
    plan_.work.erase(work);
  }
  MILLRACE_CHECK(!e.started);
  running_.erase(std::find(running_.begin(), running_.end(), id));
  slots_ -= e.samples;
  e.swapped = swap;
  e.preempted = true;
  e.drafts = 0;
  if (swap) {
    ++swapped_count_;
  } else {
    e.computed = 0;
  }
  plan_.preempted.push_back({id, swap});
  push_waiting(id);
}

// One token for every sequence that has computed all but its newest.
void Scheduler::plan_running(const Memory& memory, const Rates& rates) {
  for (size_t i = 0; i < running_.size(); ++i) {
    const Id id = running_[i];
    const Entry& e = entries_[id];
    if (e.state != State::kRunning || e.known - e.computed > 1) continue;
    const Counts need = memory.to_grow(id, 1);
    // Those behind it in running_ give way, the last first; then it does itself.
    while (!fits(need, 0) && running_.size() > i + 1) preempt(running_.back(), memory, rates);
    if (!fits(need, 0)) {
      if (running_.size() > 1) preempt(id, memory, rates);  // alone: nobody could give way to it
      break;
    }
    take(need);
    --rows_left_;
    --logits_left_;
    plan_.work.push_back({.id = id, .tokens = 1, .drafts = 0, .last = true});
  }
}

void Scheduler::plan_drafts(const Memory& memory) {
  int32_t left = limits_.draft_rows;
  for (Work& work : plan_.work) {
    const int32_t n = std::min({entries_[work.id].drafts, left, rows_left_, logits_left_});
    if (n <= 0) continue;
    Counts extra = memory.to_grow(work.id, 1 + n);
    const Counts had = memory.to_grow(work.id, 1);
    for (int g = 0; g < limits_.groups; ++g) extra[g] -= had[g];
    // A draft is not worth anybody's block: those running keep one each.
    if (!fits(extra, static_cast<int32_t>(running_.size()))) continue;
    take(extra);
    work.drafts = n;
    left -= n;
    rows_left_ -= n;
    logits_left_ -= n;
  }
}

// As large a chunk as budget and blocks allow; none when there are none.
void Scheduler::plan_chunk(Id id, const Memory& memory) {
  const Entry& e = entries_[id];
  const int32_t missing = e.known - e.computed;
  int32_t tokens = std::min({missing, prompt_left_, rows_left_});
  if (logits_left_ <= 0) tokens = std::min(tokens, missing - 1);
  Counts need{};
  for (; tokens > 0; tokens /= 2) {
    need = memory.to_grow(id, tokens);
    if (fits(need, 0)) break;
  }
  if (tokens <= 0 || (limits_.whole_prompts && tokens < missing)) return;
  take(need);
  const bool last = tokens == missing;
  rows_left_ -= tokens;
  prompt_left_ -= tokens;
  if (last) --logits_left_;
  plan_.work.push_back({.id = id, .tokens = tokens, .drafts = 0, .last = last});
}

void Scheduler::plan_prompts(const Memory& memory, const Rates& rates) {
  for (size_t i = 0; i < running_.size() && prompt_left_ > 0 && rows_left_ > 0; ++i) {
    const Id id = running_[i];
    const Entry& e = entries_[id];
    if (e.state != State::kRunning || e.known - e.computed <= 1) continue;
    const size_t planned = plan_.work.size();
    plan_chunk(id, memory);
    while (plan_.work.size() == planned && running_.size() > i + 1 && logits_left_ > 0 &&
           !fits(memory.to_grow(id, 1), 0)) {
      const size_t before_preemption = plan_.work.size();
      preempt(running_.back(), memory, rates);
      if (plan_.work.size() != before_preemption) break;  // blocks enough for the next plan
      plan_chunk(id, memory);
    }
  }
  // Nobody can move: the last gives way to the rest, so that the next plan can.
  if (plan_.work.empty() && running_.size() > 1 && std::none_of(running_.begin(), running_.end(), [&](Id id) {
        return entries_[id].state == State::kLoading;
      })) {
    preempt(running_.back(), memory, rates);
  }
}

// Room for one that waits, taken from those far enough below it; nothing happens when all of them together
// would not do.
bool Scheduler::preempt_for(Id id, const Counts& blocks, const Memory& memory, const Rates& rates) {
  const Entry& e = entries_[id];
  const Counts left = left_;
  int32_t slots = slots_;
  size_t keep = running_.size();
  bool enough = false;
  while (!enough && keep > 0) {
    const Id last = running_[keep - 1];
    if (entries_[last].key >= e.key - kPreemptBelow || entries_[last].started) break;
    --keep;
    slots -= entries_[last].samples;
    give(memory.freed_by(last));
    enough = slots + e.samples <= limits_.max_running && fits(blocks, keep == 0 ? 0 : slots + e.samples);
  }
  left_ = left;
  if (!enough) return false;
  while (running_.size() > keep) preempt(running_.back(), memory, rates);
  return true;
}

void Scheduler::drop_stale() {
  while (!waiting_.empty() && entries_[waiting_.front().id].life != waiting_.front().life) {
    std::pop_heap(waiting_.begin(), waiting_.end(), served_after);
    waiting_.pop_back();
  }
}

void Scheduler::start(Id id, const Memory::Start& how) {
  Entry& e = entries_[id];
  std::pop_heap(waiting_.begin(), waiting_.end(), served_after);
  waiting_.pop_back();
  --waiting_count_;
  if (e.swapped) --swapped_count_;
  plan_.started.push_back({.id = id, .swapped = e.swapped, .loading = how.loading});
  if (!e.swapped) e.computed = how.computed;
  e.swapped = false;
  e.state = how.loading ? State::kLoading : State::kRunning;
  e.started = true;
  slots_ += e.samples;
  insert_running(id);
  take(how.blocks);
  if (how.loading) return;
  const int32_t missing = e.known - e.computed;
  int32_t tokens = std::min({missing, std::max(prompt_left_, 1), rows_left_});
  if (logits_left_ <= 0) tokens = std::min(tokens, missing - 1);
  if (tokens <= 0) return;
  const bool last = tokens == missing;
  rows_left_ -= tokens;
  if (missing > 1) prompt_left_ -= tokens;
  if (last) --logits_left_;
  plan_.work.push_back({.id = id, .tokens = tokens, .drafts = 0, .last = last});
  ++plan_.started_work;
}

void Scheduler::plan_starts(const Memory& memory, const Rates& rates) {
  while (true) {
    drop_stale();
    if (waiting_.empty() || rows_left_ <= 0 || prompt_left_ <= 0) return;
    const Id id = waiting_.front().id;
    const Entry& e = entries_[id];
    if (e.preempted) return;  // in this very plan
    if (limits_.whole_prompts && (e.known > rows_left_ || logits_left_ <= 0)) return;
    const Memory::Start how = memory.to_start(id);
    // One block further for everybody who runs then; alone it needs no more than it takes.
    const int32_t headroom = running_.empty() ? 0 : slots_ + e.samples;
    if (slots_ + e.samples <= limits_.max_running && fits(how.blocks, headroom)) {
      start(id, how);
    } else if (!preempt_for(id, how.blocks, memory, rates)) {
      return;
    }
  }
}

}  // namespace millrace::sched
