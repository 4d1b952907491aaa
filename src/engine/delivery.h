// Delivery: what clients are told, and how samples end. A sample ends here and nowhere else: the scheduler
// forgets it, its blocks go back, its last event goes out and the statistics count it.
#pragma once

#include <cstdint>
#include <exception>
#include <vector>

#include "engine/device_loss.h"
#include "engine/recorder.h"
#include "engine/sample_table.h"

namespace millrace {

class Delivery {
 public:
  using Id = sched::Id;

  // context: tokens of a sequence, at which it ends.
  Delivery(SampleTable& samples, sched::Scheduler& scheduler, DeviceLoss& loss, Recorder& recorder,
           int32_t context)
      : samples_(samples), scheduler_(scheduler), loss_(loss), recorder_(recorder), context_(context) {}

  // One token, before which the sample had `fed` tokens. True when it was the last and the sample has ended.
  bool token(Id id, const SampledToken& token, int32_t fed);
  void embedding(Id id, std::vector<float> embedding);  // and the sample has ended

  void end(Id id, FinishReason reason);
  void fail(Id id, const std::exception_ptr& error) noexcept;  // no effect on one that has ended
  void end_all(FinishReason reason);
  bool fail_all(const std::exception_ptr& error) noexcept;  // false: there was nobody
  // Those that never became samples: a whole request, one of the answers that its first was to fork into.
  void fail_job(Job& job, const std::exception_ptr& error) noexcept;
  void fail_fork(Job& job, int32_t index, const std::exception_ptr& error) noexcept;

 private:
  void record_token(Sample& sample, double now);
  void finish(Id id, Event&& event) noexcept;
  void finish_unforked(Job& job, const Event& first) noexcept;

  SampleTable& samples_;
  sched::Scheduler& scheduler_;
  DeviceLoss& loss_;
  Recorder& recorder_;
  const int32_t context_;
};

}  // namespace millrace
