// SampleTable: every sample in flight by the scheduler's id, and the two ways they are looked for besides:
// those of a request, and those whose blocks are still being read from disk. Owns the samples.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/sample_state.h"
#include "sched/scheduler.h"

namespace millrace {

class SampleTable {
 public:
  using Id = sched::Id;

  explicit SampleTable(int32_t max_running);

  // The id that the next sample of this job gets, with all the memory made that add() and set_loading() take.
  // Throws when there is none.
  Id next_id(const Job& job);
  void add(Id id, std::unique_ptr<Sample> sample) noexcept;
  void remove(Id id) noexcept;
  // What next_id() made for a job none of whose samples came to be.
  void forget_job(const Job& job) noexcept { ids_of_.erase(job.events->id); }

  Sample& operator[](Id id) const { return *slots_[static_cast<size_t>(id)].sample; }
  bool holds(Id id) const { return slots_[static_cast<size_t>(id)].sample != nullptr; }
  // Ids are used again; the count of uses tells one life from the next.
  uint32_t life(Id id) const { return slots_[static_cast<size_t>(id)].life; }
  Sample* find(Id id, uint32_t life) const;  // null: that sample has ended

  bool empty() const { return ids_of_.empty(); }
  Id end() const { return static_cast<Id>(slots_.size()); }  // ids are below it
  const std::vector<Id>& ids_of(uint64_t request) const;     // those not ended

  const std::vector<Id>& loading() const { return loading_; }  // in no order
  void set_loading(Id id) noexcept { loading_.push_back(id); }
  void set_loaded(Id id) noexcept;

 private:
  struct Slot {
    std::unique_ptr<Sample> sample;
    uint32_t life = 0;
  };
  std::vector<Slot> slots_;  // by id
  std::vector<Id> free_ids_;
  std::vector<Id> loading_;
  std::unordered_map<uint64_t, std::vector<Id>> ids_of_;
};

}  // namespace millrace
