#include "engine/sample_table.h"

#include <algorithm>

namespace millrace {
namespace {

// Doubled, so that many samples cost no more than their number.
template <class T>
void reserve_for(std::vector<T>& list, size_t count) {
  if (list.capacity() < count) list.reserve(std::max(count, 2 * list.capacity()));
}

}  // namespace

SampleTable::SampleTable(int32_t max_running) { loading_.reserve(static_cast<size_t>(max_running)); }

sched::Id SampleTable::next_id(const Job& job) {
  ids_of_[job.events->id].reserve(static_cast<size_t>(job.request.samples));
  if (free_ids_.empty()) {
    const size_t count = slots_.size() + 1;
    reserve_for(free_ids_, count);
    reserve_for(loading_, count);
    slots_.emplace_back();
    free_ids_.push_back(static_cast<Id>(count) - 1);
  }
  return free_ids_.back();
}

void SampleTable::add(Id id, std::unique_ptr<Sample> sample) noexcept {
  free_ids_.pop_back();
  ids_of_.find(sample->job->events->id)->second.push_back(id);
  slots_[static_cast<size_t>(id)].sample = std::move(sample);
}

void SampleTable::remove(Id id) noexcept {
  Slot& slot = slots_[static_cast<size_t>(id)];
  const auto found = ids_of_.find(slot.sample->job->events->id);
  if (found != ids_of_.end()) {
    std::erase(found->second, id);
    if (found->second.empty()) ids_of_.erase(found);
  }
  set_loaded(id);
  slot.sample.reset();
  ++slot.life;
  free_ids_.push_back(id);
}

Sample* SampleTable::find(Id id, uint32_t life) const {
  const Slot& slot = slots_[static_cast<size_t>(id)];
  return slot.life == life ? slot.sample.get() : nullptr;
}

const std::vector<sched::Id>& SampleTable::ids_of(uint64_t request) const {
  static const std::vector<Id> kNone;
  const auto found = ids_of_.find(request);
  return found == ids_of_.end() ? kNone : found->second;
}

void SampleTable::set_loaded(Id id) noexcept { std::erase(loading_, id); }

}  // namespace millrace
