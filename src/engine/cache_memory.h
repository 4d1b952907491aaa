// CacheMemory: what the scheduler asks about memory while it plans, answered by the KV cache and the samples.
#pragma once

#include <cstdint>

#include "engine/runtime.h"
#include "engine/sample_table.h"
#include "sched/scheduler.h"

namespace millrace {

class CacheMemory final : public sched::Memory {
 public:
  CacheMemory(Runtime& runtime, const SampleTable& samples);

  int32_t available(int count) const override;
  sched::Counts to_grow(sched::Id id, int32_t tokens) const override;
  Start to_start(sched::Id id) const override;
  sched::Counts freed_by(sched::Id id) const override;
  double swap_seconds(sched::Id id) const override;

 private:
  const kv::Cache& cache_;
  const ExecutorSpec& spec_;
  const SampleTable& samples_;
};

}  // namespace millrace
