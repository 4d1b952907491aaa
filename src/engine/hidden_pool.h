// Hidden states of a prompt's tokens on their way to one embedding, or to a client who wants them all. Summed
// in double in the order of their positions, so that it does not matter in which chunks they come.
#pragma once

#include <cstdint>
#include <vector>

#include "base/buffer_pool.h"
#include "engine/runtime.h"
#include "millrace/request.h"

namespace millrace {

class HiddenPool {
 public:
  HiddenPool(Pooling kind, int32_t prompt_tokens, int32_t hidden);

  // Adds the positions [first, last) of a step, whose rows begin at `first_row`; those of a prompt that is
  // computed again are in already.
  void add(const Runtime& runtime, int32_t first_row, int32_t first, int32_t last);
  bool complete() const { return next_ == end_; }
  std::vector<float> take();  // their mean [hidden]; of Pooling::kNone all of them [tokens, hidden]

 private:
  const Pooling kind_;
  Buffer<double> sum_;       // [hidden]
  std::vector<float> rows_;  // [tokens so far, hidden], of Pooling::kNone
  Buffer<float> row_;        // [hidden]
  int32_t next_;             // position to be added; those before it are in, or not wanted
  int32_t end_;              // behind the last wanted
  int32_t count_;            // positions that will be in
};

}  // namespace millrace
