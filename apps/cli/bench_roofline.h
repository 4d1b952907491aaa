// millrace bench --roofline: every operation's time beside the bytes and operations it needs, and beside what
// the machine could do at most, measured in the same run. An executor that times each call stands between the
// model and the device (OpMeter); what a call needs is counted from its weights and its batch:
//   bytes        weights once per call (experts: those that this many tokens are expected to choose),
//                keys and values that are in sight once per sequence; activations, which stay in the
//                caches, not at all
//   lost         time beyond what the larger of both limits allows: where to look first
//   operations   two per weight and token, four per query, position in sight and dimension of attention
#pragma once

#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "backend/backend.h"
#include "engine/runtime.h"

namespace millrace::cli {

inline constexpr size_t kNumOperations = static_cast<size_t>(Operation::kPick) + 1;  // the last of them

struct OpTotals {
  int64_t calls = 0;
  double seconds = 0.0, bytes = 0.0;
  // By the arithmetic that their weights' type asks for; 4-bit floats are bf16's where there are tiles for
  // it.
  double int8_ops = 0.0, tile_ops = 0.0, float_ops = 0.0;
};

class OpMeter : public std::enable_shared_from_this<OpMeter> {
 public:
  void attach(RuntimeSetup& setup);    // before Runtime::open
  void watch(const Runtime& runtime);  // after it
  // Waits for what was asked of a device that times operations itself.
  void collect();
  void watch(Executor& executor) { executor_ = &executor; }
  void reset() { totals_.assign(kNumOperations, {}); }
  const OpTotals& totals(Operation op) const { return totals_[static_cast<size_t>(op)]; }
  const Runtime& runtime() const { return *runtime_; }
  OpTotals& at(Operation op) { return totals_[static_cast<size_t>(op)]; }

 private:
  const Runtime* runtime_ = nullptr;
  Executor* executor_ = nullptr;
  std::vector<OpTotals> totals_ = std::vector<OpTotals>(kNumOperations);
};

struct RooflineRun {
  int32_t prompt, generate, depth, repeat;
};
// Runs both phases under the meter and prints the table. A device whose calls return early times operations
// itself.
int roofline(Runtime& runtime, OpMeter& meter, const RooflineRun& run, bool json);

// Any tokens will do; these spread over the vocabulary so that embedding rows and experts vary.
std::vector<int32_t> some_tokens(int32_t count, int32_t vocab);

// A sequence that holds `depth` tokens.
kv::Sequence sequence_at(Runtime& runtime, int32_t depth, const std::function<void(int32_t done)>& progress);

}  // namespace millrace::cli
