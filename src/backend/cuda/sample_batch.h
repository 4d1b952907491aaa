// What a step's rows are sampled with, as one piece of memory that goes to the device in one copy: the rows'
// parameters, then the lists and masks they point to (ops/sample.h). No CUDA in here but its types.
#pragma once

#include <span>
#include <vector>

#include "backend/backend.h"
#include "kernels/cuda/sample/sample.h"

namespace millrace::cuda {

class SampleBatch {
 public:
  // Lays the rows out. Rows that ask for more than the kernel does, and those whose lists would make this
  // larger than `max_bytes`, are left out: skips() says which.
  void lay_out(std::span<const SampleRow> rows, size_t max_bytes = size_t{64} << 20);

  bool plain_greedy() const { return plain_greedy_; }  // of all rows that are wanted
  bool details() const { return details_; }            // is a logprob wanted?
  bool skips(size_t row) const { return params_[row].mode == SampleParams::kSkip; }
  int32_t logprobs(size_t row) const { return params_[row].logprobs; }
  size_t rows() const { return params_.size(); }
  size_t bytes() const { return words_ * kWord; }
  void fill(std::span<const SampleRow> rows, void* out) const;  // [bytes()], aligned to 8

 private:
  static constexpr size_t kWord = 8;  // all offsets
  std::vector<SampleParams> params_;
  size_t words_ = 0;
  bool plain_greedy_ = true, details_ = false;
};

}  // namespace millrace::cuda
