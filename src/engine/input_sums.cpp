#include "engine/input_sums.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace millrace {

std::span<const double> InputSums::squares_of(const float* x, int64_t rows, int64_t cols, int64_t stride) {
  row_.assign(static_cast<size_t>(cols), 0.0);
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = x + r * stride;
    for (int64_t c = 0; c < cols; ++c) row_[static_cast<size_t>(c)] += double{row[c]} * row[c];
  }
  return row_;
}

void InputSums::see_latent(const Weight& k_b, int64_t rank, const float* x, int64_t rows, int64_t stride) {
  constexpr std::string_view kPart = "attn_k_b.";
  std::string name = model_.stored_weight(k_b).name;
  const size_t at = name.find(kPart);
  if (at == std::string::npos) return;
  Sums& sums = sums_[name.replace(at, kPart.size(), "attn_kv_b.")];
  sums.cols = rank;
  sums.squares.resize(static_cast<size_t>(rank));
  sums.counts.resize(1);
  const std::span<const double> squares = squares_of(x, rows, rank, stride);
  for (size_t c = 0; c < squares.size(); ++c) sums.squares[c] += squares[c];
  sums.counts[0] += static_cast<double>(rows);
}

void InputSums::see(std::span<const Weight* const> weights, int64_t expert, const float* x, int64_t rows,
                    int64_t stride) {
  const int64_t cols = weights[0]->cols;
  bool summed = false;
  for (const Weight* weight : weights) {
    auto known = of_.find(weight);
    if (known == of_.end()) {
      Sums& sums = sums_[model_.stored_weight(*weight).name];
      if (sums.first == nullptr) {
        sums.first = weight;
        sums.cols = cols;
        sums.squares.resize(static_cast<size_t>(weight->experts * cols));
        sums.counts.resize(static_cast<size_t>(weight->experts));
      }
      known = of_.emplace(weight, sums.first == weight ? &sums : nullptr).first;
    }
    if (known->second == nullptr) continue;
    if (!summed) {
      squares_of(x, rows, cols, stride);
      summed = true;
    }
    double* to = known->second->squares.data() + expert * cols;
    for (int64_t c = 0; c < cols; ++c) to[c] += row_[static_cast<size_t>(c)];
    known->second->counts[static_cast<size_t>(expert)] += static_cast<double>(rows);
  }
}

std::map<std::string, io::ImportanceEntry> InputSums::entries() const {
  std::map<std::string, io::ImportanceEntry> out;
  for (const auto& [name, sums] : sums_) {
    io::ImportanceEntry& entry = out[name];
    entry.matrices = static_cast<int64_t>(sums.counts.size());
    entry.cols = sums.cols;
    entry.sums.assign(sums.squares.begin(), sums.squares.end());
    entry.counts.assign(sums.counts.begin(), sums.counts.end());
  }
  return out;
}

namespace {

// Weights with the same inputs: what else an entry for this one may be called.
std::vector<std::string> other_names(const std::string& name) {
  struct SharedInputs {
    const char* whole;
    std::vector<const char*> parts;
  };
  static const SharedInputs kShared[] = {{"attn_qkv.", {"attn_q.", "attn_k.", "attn_v."}},
                                         {"ffn_up.", {"ffn_gate."}},
                                         {"ssm_in.", {"attn_qkv.", "attn_gate."}},
                                         {"ssm_ba.", {"ssm_beta.", "ssm_alpha."}},
                                         {"ffn_gate_up_exps.", {"ffn_gate_exps.", "ffn_up_exps."}}};
  std::vector<std::string> out;
  const auto swapped = [&](std::string_view from, std::string_view to) {
    std::string other = name;
    out.push_back(other.replace(other.find(from), from.size(), to));
  };
  for (const SharedInputs& family : kShared) {
    const auto has = [&](std::string_view part) {
      const size_t at = name.find(part);
      return at != std::string::npos && at > 0 && name[at - 1] == '.';
    };
    if (has(family.whole)) {
      for (const char* part : family.parts) swapped(family.whole, part);
    }
    for (const char* part : family.parts) {
      if (has(part)) swapped(part, family.whole);
    }
  }
  return out;
}

}  // namespace

std::vector<float> importance_of(const io::ImportanceMatrix& matrix, const std::string& path,
                                 const std::string& name, int64_t matrices, int64_t cols) {
  auto found = matrix.entries.find(name);
  for (const std::string& other : other_names(name)) {
    if (found == matrix.entries.end()) found = matrix.entries.find(other);
  }
  if (found == matrix.entries.end()) return {};
  const io::ImportanceEntry& entry = found->second;
  const bool flat = entry.matrices == 1 && entry.cols == matrices * cols;  // the older form
  if (!flat && (entry.matrices != matrices || entry.cols != cols)) {
    throw_error(ErrorCode::kBadInput,
                "{}: {}: found sums of {} x {} columns, expected {} x {}: another model's", path,
                found->first, entry.matrices, entry.cols, matrices, cols);
  }
  std::vector<float> out(static_cast<size_t>(matrices * cols), 1.0f);
  for (int64_t m = 0; m < matrices; ++m) {
    const float* sums = entry.sums.data() + m * cols;
    const double total = std::accumulate(sums, sums + cols, 0.0);
    if (total <= 0.0 || entry.counts[flat ? 0 : static_cast<size_t>(m)] == 0.0f) continue;
    const double mean = total / static_cast<double>(cols);
    for (int64_t c = 0; c < cols; ++c) {
      out[static_cast<size_t>(m * cols + c)] = static_cast<float>((sums[c] + 0.1 * mean) / (1.1 * mean));
    }
  }
  return out;
}

}  // namespace millrace
