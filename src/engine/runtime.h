// Runtime: a checkpoint opened, its model on a device, its tokenizer, and room to run sequences. The plain
// form of the engine: whoever calls it says which sequences step. (The scheduler that decides for many
// clients builds on the same parts.)
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "base/buffer_pool.h"
#include "engine/executor_store.h"
#include "io/checkpoint.h"
#include "jinja/chat_template.h"
#include "kv/cache.h"
#include "model/model.h"
#include "tokenizer/tokenizer.h"

namespace millrace {

// Nothing is remembered: for callers who say themselves which sequence steps.
inline kv::CacheOptions forgetful() {
  kv::CacheOptions options;
  options.prefix_cache = false;
  return options;
}

struct AutoQuantize {
  std::string budget;  // "4.5bpw", "800M"
  std::string sample;  // a text to measure by; empty: the built-in one
};

struct RuntimeOptions {
  std::string device = "cpu";  // auto: a GPU if there is one with room for the model, else the CPU
  int threads = 0;             // 0: all
  double gpu_memory = 0.9;     // of a GPU's free memory, how much may be taken
  int32_t context = 0;         // tokens per sequence; 0: min(trained, 4096)
  int32_t sequences = 1;       // that fit at full length
  int32_t step_tokens = 0;     // rows per step: longer prompts go in chunks of this; 0: the device's
  int32_t logit_rows = 1;      // most logit rows asked for in a step
  std::optional<DType> kv_type;
  bool lock = false;    // keep weights and cache in memory: nothing is paged out
  TypeChoice quantize;  // of weights, while they are loaded
  InputsOf quantize_inputs;
  std::optional<AutoQuantize> quantize_auto;  // instead: the types are chosen by measurement (auto_types.h)
  std::string
      quantized_to;  // what `quantize` does, in a word: other weights, so other names for cached blocks
  // Stands between the model and the device's executor: to watch or to time what is called.
  std::function<std::unique_ptr<Executor>(std::unique_ptr<Executor>)> wrap_executor;
  // The main pool: as many contexts as there are sequences, or a pool for all of them together.
  bool shared_pool = false;
  int64_t kv_tokens = 0;  // of a shared pool; 0: every sequence at full length, as far as kv_bytes go
  size_t kv_bytes = 0;    // 0: half of the memory available
  std::vector<int32_t> kv_blocks;  // per layer group, instead of all that
  // What is remembered beyond the life of a sequence; groups and identity are the runtime's to fill in.
  kv::CacheOptions cache = forgetful();
  LoadProgress progress;
};

// One stream of tokens in the runtime's cache; to be destroyed before the runtime.
class Sequence {
 public:
  explicit Sequence(kv::Sequence blocks) : blocks_(std::move(blocks)) {}
  int32_t length() const { return blocks_.length(); }

 private:
  friend class Runtime;
  kv::Sequence blocks_;
};

// Some tokens of one sequence whose blocks are reserved: a row of the engine's own steps.
struct Slice {
  const kv::Sequence* sequence = nullptr;
  std::span<const int32_t> tokens;
  enum class Want { kNone, kLast, kAll } want = Want::kLast;
  int32_t ahead = 0;  // tokens computed before these that do not count yet: drafts
  // Not -1: the one token is what the device picks in this row of the step before (Batch::sampled_rows).
  int32_t sampled_row = -1;
  bool hidden = false;  // read_hidden will be asked for its rows
};

// Some new tokens of one sequence, and which of them want logits.
struct StepInput {
  Sequence* sequence = nullptr;
  std::span<const int32_t> tokens;
  using Want = Slice::Want;
  Want want = Want::kLast;
};

class Runtime {
 public:
  // Loads everything. Throws Error.
  static std::unique_ptr<Runtime> open(const std::string& path, const RuntimeOptions& options);

  const io::Checkpoint& checkpoint() const { return checkpoint_; }
  const ModelConfig& config() const { return model_->config(); }
  const Model& model() const { return *model_; }
  Backend& backend() { return *backend_; }
  const Backend& backend() const { return *backend_; }
  const std::string& device_note() const { return device_note_; }  // ChosenBackend::note
  const ExecutorSpec& spec() const { return spec_; }
  int32_t context() const { return spec_.max_context; }
  // What quantize_auto chose and what it is expected to cost; empty without it.
  const std::string& quantized() const { return quantized_; }
  const TypeChoice& type_choice() const {
    return type_choice_;
  }  // of the weights that were quantized on load

  bool has_tokenizer() const { return tokenizer_ != nullptr; }
  // Throws Error{kBadInput} when the checkpoint has none.
  const Tokenizer& tokenizer() const;
  std::shared_ptr<const Tokenizer> shared_tokenizer() const;
  // Parsed at the first call; nullptr when the checkpoint has none. Throws Error when it cannot be
  // understood.
  const ChatTemplate* chat_template();
  // Where generation ends: the config's, the tokenizer's.
  const std::vector<int32_t>& end_tokens() const { return end_tokens_; }

  Sequence make_sequence();
  kv::Cache& cache() { return *cache_; }
  Executor& executor() { return *executor_; }

  // One ragged step. Returns logits [wanted rows, vocab] in input order, valid until the next step. The sum
  // of tokens must be at most spec().max_tokens. Throws Error{kBadInput} when a sequence would pass the
  // context or a token id is not in the vocabulary, Error{kNoMemory} when the pool has no block left (nothing
  // is changed then).
  std::span<const float> step(std::span<const StepInput> inputs);

  // The same step, of which only the tokens with the largest logits are wanted: on a device that finds them
  // itself no logits cross the bus. [wanted rows], valid until the next step.
  std::span<const int32_t> step_greedy(std::span<const StepInput> inputs);

  // Greedy decoding of one sequence: `token` is fed, the token that follows goes into out[0] and is fed, and
  // so on; the last one is not. Where the device samples, a step is launched before the last one's token is
  // read.
  void generate_greedy(Sequence& sequence, int32_t token, std::span<int32_t> out);

  // The step itself, for callers who reserve before and advance after it as they like: logits as above,
  // unchecked. Nothing is allocated once the largest batch has been seen.
  std::span<const float> forward(std::span<const Slice> slices);
  // The same without waiting, for those who let the executor sample.
  void launch(std::span<const Slice> slices) { compute(slices); }
  // Throws for a row from which the device picked no token (SampledRow): what check_logits or the sampler
  // would.
  [[noreturn]] void explain_no_token(int32_t sampled) const;
  // The hidden state of one row of that step (all slices' tokens in order) behind the last norm, [hidden].
  void read_hidden(int32_t row, std::span<float> to) const { model_->read_hidden(*executor_, row, to); }
  // Throws Error{kBadInput} naming the damage in the file when a row of logits holds a NaN.
  void check_logits(std::span<const float> row) const;
  void check_tokens(std::span<const int32_t> tokens) const;  // Error{kBadInput} for ids out of range

  // Feeds any number of tokens in chunks of spec().max_tokens; logits of the last one.
  std::span<const float> prefill(Sequence& sequence, std::span<const int32_t> tokens);

  // Lengthens a sequence without computing: its last block of keys and values again and again. What it then
  // says is nonsense, but takes the time that it would. `sequence` ends with a block, `tokens` are whole
  // blocks.
  void repeat_last_block(Sequence& sequence, int32_t tokens);

 private:
  Runtime() = default;
  void compute(std::span<const Slice> slices);
  void compute_inputs(std::span<const StepInput> inputs);
  void advance(std::span<const StepInput> inputs);
  std::span<const float> checked_logits();
  void check_input(const StepInput& input) const;

  io::Checkpoint checkpoint_;  // first: everything below points into its mapping
  std::unique_ptr<Backend> backend_;
  std::string device_note_;
  std::unique_ptr<Model> model_;
  ExecutorSpec spec_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<ExecutorStore> store_;
  std::unique_ptr<kv::Cache> cache_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::string tokenizer_error_;
  std::optional<ChatTemplate> chat_template_;
  std::vector<int32_t> end_tokens_;
  std::string quantized_;
  TypeChoice type_choice_;
  // Reused by every step.
  Buffer<int32_t> tokens_, logit_rows_, sampled_rows_, greedy_;
  Buffer<SequenceSlice> batch_;
  Buffer<Slice> step_slices_;
};

// What names a checkpoint's weights: its layout, and bytes from every tensor. Two files with the same name
// and different weights differ here.
std::string checkpoint_identity(const io::Checkpoint& checkpoint, const ModelConfig& config);

// The tokenizer and chat template of a checkpoint, without loading weights.
std::shared_ptr<const Tokenizer> load_tokenizer(const io::Checkpoint& checkpoint);
std::string chat_template_text(const io::Checkpoint& checkpoint);  // empty when there is none

// The executor's limits that these options mean for a model on a device; plan and runtime both use them.
ExecutorLimits runtime_limits(const ModelConfig& config, const Backend& backend,
                              const RuntimeOptions& options);

// The same with the pools' sizes. Throws Error{kNoMemory} saying what is missing when a device's own memory
// is too small for the model, or the pool for one context.
ExecutorSpec runtime_spec(const io::Checkpoint& checkpoint, const ModelConfig& config, const Backend& backend,
                          const RuntimeOptions& options);

// Throws Error{kNoMemory} when contexts of their own do not fit the machine's memory. A pool promises pages
// that it has not got yet: without this, the one that is too many ends the process.
void check_context(const ModelConfig& config, const Backend& backend, const RuntimeOptions& options);

struct ChosenBackend {
  std::unique_ptr<Backend> backend;
  std::string note;  // ModelInfo::device_note
};
// The device that the options name.
ChosenBackend open_backend(const io::Checkpoint& checkpoint, const ModelConfig& config,
                           const RuntimeOptions& options);

// What the kernel would give us without swapping, cut by the cgroup's limit.
size_t available_memory();

// What running this checkpoint takes, known before anything is loaded.
struct MemoryPlan {
  size_t weights_mapped = 0;    // read from the file's mapping
  size_t weights_repacked = 0;  // copies the backend makes
  size_t weights_opened = 0;    // second copies that only prompts read
  size_t workspace = 0;
  size_t pool = 0;  // KV blocks
  struct Group {
    int32_t window, layers;
    size_t bytes_per_1k_tokens;  // of a sequence up to its window
    size_t bytes_at_context;     // one sequence of context_length
  };
  std::vector<Group> groups;
  int32_t context = 0;  // planned
  DType kv_type = DType::kF32;
  size_t memory_available = 0;   // what the machine has for us
  size_t total = 0;              // of that: mapped (where it is the machine's) + copies + workspace + pool
  int32_t longest_context = 0;   // that fits beside the weights for one sequence, at most the trained one
  int32_t users_at_context = 0;  // sequences of `context` that fit
  std::string does_not_fit;      // why running it would be refused, with what would fit; empty: it fits
};
MemoryPlan plan_memory(const io::Checkpoint& checkpoint, const ModelConfig& config, const Backend& backend,
                       const RuntimeOptions& options);

}  // namespace millrace
