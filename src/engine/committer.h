// Committer: what a step computed comes to count. Tokens that were picked join their sequence, its blocks
// advance, its client is told; and a prompt that is computed forks into the samples that share it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "engine/delivery.h"
#include "engine/picker.h"
#include "engine/recorder.h"
#include "engine/runtime.h"
#include "engine/sample_table.h"
#include "engine/step_item.h"
#include "sched/scheduler.h"

namespace millrace {

class Committer {
 public:
  Committer(Runtime& runtime, SampleTable& samples, sched::Scheduler& scheduler, const Picker& picker,
            Delivery& delivery, Recorder& recorder, const EngineOptions& options);

  // What was picked for this item, or its failure: afterwards the sample may have ended.
  void commit(const StepItem& item);
  // Of an item that forks(): the other samples share its blocks, pick their own first tokens from its row of
  // `logits` and are committed.
  void fork(const StepItem& item, std::span<const float> logits);

 private:
  void advance(const StepItem& item);
  static void take_scores(Sample& sample);
  void record_drafts(const StepItem& item, int32_t right);
  std::unique_ptr<Sample> make_child(const Sample& parent, int32_t index);
  void deliver_embedding(const StepItem& item);

  Runtime& runtime_;
  kv::Cache& cache_;
  SampleTable& samples_;
  sched::Scheduler& scheduler_;
  const Picker& picker_;
  Delivery& delivery_;
  Recorder& recorder_;
  const EngineOptions& options_;
  Buffer<int32_t> names_;
};

}  // namespace millrace
