// Attention as the engine launches it, for attention_test.py: cases come in on stdin, each step's output goes
// to stdout. Executor::rope_append_kv and attend choose kernels, fuse and replay as in a model's step.
// Outputs and every block of the cache are NaN before they are written, and again once a block has left the
// window.
//   attention_driver DEVICE < cases
// Little endian, no padding; ends at the end of its input:
//   case   int32 heads, kv_heads, head_dim, window, rotary dims / 2, sinks 0/1, interleaved 0/1,
//          blocks in order 0/1, kv type (DType), max_tokens, max_context, num_blocks;
//          float32 scale, magnitude, inv_freq[half], sinks[heads] when there are any
//   step   int32 pieces (0: the case is over), per piece sequence, tokens;
//          float32 query [rows, heads, dim], key and value [rows, kv_heads, dim]
//   answer float32 attention [rows, heads, dim]
#include <algorithm>
#include <cstdio>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "base/error.h"

namespace millrace {
namespace {

constexpr int kLayers = 2, kLayer = 1;  // of the one group; the second is used

// False at the end of the input, which may only come before the first byte.
bool read_bytes(void* to, size_t bytes) {
  const size_t got = std::fread(to, 1, bytes, stdin);
  if (got == bytes) return true;
  if (got == 0) return false;
  throw_error(ErrorCode::kBadInput, "stdin: found {} bytes, expected {}", got, bytes);
}
template <class T>
std::vector<T> read_some(size_t count) {
  std::vector<T> values(count);
  if (count > 0 && !read_bytes(values.data(), count * sizeof(T))) {
    throw_error(ErrorCode::kBadInput, "stdin: found its end, expected {} numbers", count);
  }
  return values;
}

struct CaseHeader {
  int32_t heads, kv_heads, head_dim, window, half, sinks, interleaved, in_order, kv_type, max_tokens,
      max_context, num_blocks;
  float scale, magnitude;
};

ExecutorSpec spec_of(const CaseHeader& c) {
  ExecutorSpec spec;
  spec.max_tokens = c.max_tokens;
  spec.max_logit_rows = 1;
  spec.max_context = c.max_context;
  spec.hidden = 32;
  spec.vocab = 16;
  spec.heads = c.heads;
  spec.kv_heads = c.kv_heads;
  spec.head_dim = c.head_dim;
  spec.kv_type = static_cast<DType>(c.kv_type);
  spec.kv_groups = {{c.window, kLayers, c.num_blocks}};
  spec.layers = {{0, 0}, {0, kLayer}};
  return spec;
}
bool equal(const ExecutorSpec& a, const ExecutorSpec& b) {
  return a.max_tokens == b.max_tokens && a.max_context == b.max_context && a.heads == b.heads &&
         a.kv_heads == b.kv_heads && a.head_dim == b.head_dim && a.kv_type == b.kv_type &&
         a.kv_groups[0].window == b.kv_groups[0].window &&
         a.kv_groups[0].num_blocks == b.kv_groups[0].num_blocks;
}

class Driver {
 public:
  explicit Driver(const char* device) : backend_(make_backend(device, {})) {
    std::fprintf(stderr, "%s\n", backend_->description().c_str());
  }

  bool run_case() {
    if (!read_bytes(&case_, sizeof case_)) return false;
    inv_freq_ = read_some<float>(static_cast<size_t>(case_.half));
    load_sinks(read_some<float>(case_.sinks != 0 ? static_cast<size_t>(case_.heads) : 0));
    prepare();
    while (run_step()) {
    }
    return true;
  }

 private:
  struct TestSequence {
    std::vector<int32_t> table;
    int32_t length = 0;
  };

  void load_sinks(std::vector<float> values) {
    sinks_.reset();
    sink_values_ = std::move(values);
    if (sink_values_.empty()) return;
    TensorView view;
    view.name = "sinks";
    view.type = DType::kF32;
    view.rank = 1;
    view.shape = {case_.heads, 1, 1, 1};
    view.row_stride_bytes = static_cast<int64_t>(sink_values_.size() * sizeof(float));
    view.data = reinterpret_cast<const std::byte*>(sink_values_.data());
    sinks_ = backend_->load_weight(view, WeightUse::kVector);
  }

  // An executor of that shape, its cache full of NaN, no sequences, the blocks to hand out.
  void prepare() {
    const ExecutorSpec spec = spec_of(case_);
    if (executor_ == nullptr || !equal(spec, spec_)) {
      executor_.reset();
      spec_ = spec;
      executor_ = backend_->make_executor(spec);
    }
    poison_.assign(spec.kv_block_bytes(0), std::byte{0xff});
    free_.clear();
    for (int32_t b = case_.num_blocks - 1; b >= 0; --b) {
      free_.push_back(b);
      executor_->write_block(0, b, poison_);
    }
    if (case_.in_order == 0) std::shuffle(free_.begin(), free_.end(), std::mt19937(5));
    sequences_.clear();
  }

  // Blocks for the new tokens; those that no later row can see go back, as NaN.
  void reserve(TestSequence& s, int32_t tokens) {
    while (static_cast<int32_t>(s.table.size()) < blocks_for(s.length + tokens)) {
      if (free_.empty()) throw_error(ErrorCode::kBadInput, "more than {} blocks", case_.num_blocks);
      s.table.push_back(free_.back());
      free_.pop_back();
    }
    if (case_.window == 0) return;
    const int32_t first = std::max(0, s.length - case_.window + 1) / kBlockTokens;
    for (int32_t i = 0; i < first; ++i) {
      int32_t& block = s.table[static_cast<size_t>(i)];
      if (block == kNoBlock) continue;
      executor_->write_block(0, block, poison_);
      free_.insert(free_.begin(), block);
      block = kNoBlock;
    }
  }

  bool run_step() {
    const int32_t pieces = read_some<int32_t>(1)[0];
    if (pieces == 0) return false;
    const std::vector<int32_t> parts = read_some<int32_t>(2 * static_cast<size_t>(pieces));
    std::vector<SequenceSlice> slices;
    int32_t rows = 0;
    for (size_t i = 0; i < parts.size(); i += 2) reserve(sequences_[parts[i]], parts[i + 1]);
    for (size_t i = 0; i < parts.size(); i += 2) {
      const TestSequence& s = sequences_[parts[i]];
      slices.push_back({rows, parts[i + 1], s.length, {s.table.data()}});
      rows += parts[i + 1];
    }
    const size_t query = static_cast<size_t>(rows) * static_cast<size_t>(case_.heads * case_.head_dim),
                 key = static_cast<size_t>(rows) * static_cast<size_t>(case_.kv_heads * case_.head_dim);
    const std::vector<int32_t> tokens(static_cast<size_t>(rows), 0);
    executor_->begin({tokens, slices, {}});
    executor_->write_slot(Slot::kQuery, read_some<float>(query));
    executor_->write_slot(Slot::kKey, read_some<float>(key));
    executor_->write_slot(Slot::kValue, read_some<float>(key));
    executor_->write_slot(Slot::kAttention,
                          std::vector<float>(query, std::numeric_limits<float>::quiet_NaN()));
    executor_->rope_append_kv({kLayer, inv_freq_, case_.magnitude, case_.interleaved != 0});
    executor_->attend({kLayer, case_.window, case_.scale, sinks_.get()});
    const std::vector<float> out = executor_->read_slot(Slot::kAttention);
    if (std::fwrite(out.data(), sizeof(float), out.size(), stdout) != out.size() ||
        std::fflush(stdout) != 0) {
      throw_error(ErrorCode::kBadInput, "stdout: cannot write {} numbers", out.size());
    }
    for (size_t i = 0; i < parts.size(); i += 2) sequences_[parts[i]].length += parts[i + 1];
    return true;
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Executor> executor_;
  ExecutorSpec spec_;
  CaseHeader case_{};
  std::vector<float> inv_freq_, sink_values_;
  WeightPtr sinks_;
  std::vector<std::byte> poison_;  // of a block
  std::vector<int32_t> free_;      // blocks, the next one last
  std::map<int32_t, TestSequence> sequences_;
};

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "attention_driver: found %d arguments, expected a device\n", argc - 1);
    return 2;
  }
  try {
    millrace::Driver driver(argv[1]);
    while (driver.run_case()) {
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "attention_driver: %s\n", error.what());
    return 2;
  }
}
