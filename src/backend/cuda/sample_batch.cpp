#include "backend/cuda/sample_batch.h"

#include <cstring>

namespace millrace::cuda {

static_assert(kMaxTopLogits >= SampleRow::kMostLogprobs);

void SampleBatch::lay_out(std::span<const SampleRow> rows, size_t max_bytes) {
  static_assert(sizeof(SampleParams) % kWord == 0 && sizeof(TokenCount) == kWord &&
                sizeof(TokenBias) == kWord && sizeof(uint64_t) == kWord);
  params_.assign(rows.size(), {});
  words_ = rows.size() * sizeof(SampleParams) / kWord;
  plain_greedy_ = true;
  details_ = false;
  for (size_t r = 0; r < rows.size(); ++r) {
    const SampleRow& row = rows[r];
    const size_t lists = row.counted.size() + row.bias.size() + row.allowed.size();
    if (!row.wanted || row.logprobs > kMaxTopLogits || (words_ + lists) * kWord > max_bytes) continue;
    SampleParams& p = params_[r];
    p.mode = row.draw ? SampleParams::kDraw : SampleParams::kGreedy;
    p.scale = row.scale;
    p.top_k = row.top_k;
    p.top_p = row.top_p;
    p.min_p = row.min_p;
    p.repetition = row.repetition_penalty;
    p.presence = row.presence_penalty;
    p.frequency = row.frequency_penalty;
    p.uniform = row.uniform;
    p.logprobs = row.logprobs;
    p.counted = static_cast<int32_t>(words_);
    p.num_counted = static_cast<int32_t>(row.counted.size());
    p.bias = p.counted + p.num_counted;
    p.num_bias = static_cast<int32_t>(row.bias.size());
    if (!row.allowed.empty()) p.allowed = p.bias + p.num_bias;
    words_ += lists;
    plain_greedy_ = plain_greedy_ && row.plain_greedy();
    details_ = details_ || row.logprobs >= 0;
  }
}

void SampleBatch::fill(std::span<const SampleRow> rows, void* out) const {
  std::memcpy(out, params_.data(), params_.size() * sizeof(SampleParams));
  const auto put = [out](int32_t word, const auto& list) {
    if (!list.empty()) {
      std::memcpy(static_cast<std::byte*>(out) + static_cast<size_t>(word) * kWord, list.data(),
                  list.size_bytes());
    }
  };
  for (size_t r = 0; r < rows.size(); ++r) {
    const SampleParams& p = params_[r];
    if (p.mode == SampleParams::kSkip) continue;
    put(p.counted, rows[r].counted);
    put(p.bias, rows[r].bias);
    put(p.allowed, rows[r].allowed);
  }
}

}  // namespace millrace::cuda
