// Runtime: a checkpoint opened, its model on a device, its tokenizer, and a KV cache to run sequences in. The
// plain form of the engine: whoever calls it says which sequences step. (The scheduler that decides for many
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
#include "dist/shares.h"
#include "engine/executor_store.h"
#include "engine/image_reader.h"
#include "engine/rank_front.h"
#include "engine/rank_group.h"
#include "engine/runtime_setup.h"
#include "io/checkpoint.h"
#include "jinja/chat_template.h"
#include "kv/cache.h"
#include "millrace/engine.h"
#include "millrace/options.h"
#include "model/classifier_head.h"
#include "model/model.h"
#include "tokenizer/tokenizer.h"

namespace millrace {

class PipelineLeader;
class RemoteExecutor;
struct AdapterSet;
struct RankShare;

// Where an image is in a prompt: its tokens, [tokens, (1 + further) * hidden] as the model reads them. The
// ids of these tokens are below 0 and stand for the image's bytes (image_reader.h).
struct ImagePlace {
  int32_t first = 0, tokens = 0;
  std::shared_ptr<const std::vector<float>> rows;
  int32_t down = 0, across = 0;  // ImageGrid's rows and columns
};

// Some tokens of one sequence whose blocks are reserved: a row of the engine's own steps.
struct Slice {
  const kv::Sequence* sequence = nullptr;
  std::span<const int32_t> tokens;
  enum class Want { kNone, kLast, kAll } want = Want::kLast;
  int32_t ahead = 0;  // tokens computed before these that do not count yet: drafts
  // Not -1: the one token is what the device picks in this row of the step before (Batch::sampled_rows).
  int32_t sampled_row = -1;
  bool hidden = false;                      // read_hidden will be asked for its rows
  int32_t adapter = -1;                     // by number (Runtime::adapter_number); -1: none
  int32_t sparse_pages = 0;                 // SequenceSlice's
  int32_t second_text = INT32_MAX;          // SequenceSlice's
  int32_t fp8_until = 0;                    // SequenceSlice's
  std::span<const ImagePlace> images = {};  // of the sequence, in order; none ends behind these tokens only
};

// Some new tokens of one sequence, and which of them want logits.
struct StepInput {
  kv::Sequence* sequence = nullptr;
  std::span<const int32_t> tokens;
  using Want = Slice::Want;
  Want want = Want::kLast;
  bool prompt = false;  // else they follow one, and are computed in full whatever the prompt was
};

class Runtime {
 public:
  // Loads everything. Throws Error.
  static std::unique_ptr<Runtime> open(const EngineOptions& options, RuntimeSetup setup = {});

  const io::Checkpoint& checkpoint() const { return checkpoint_; }
  const ModelConfig& config() const { return model_->config(); }
  const Model& model() const { return *model_; }
  Backend& backend() { return *backend_; }
  const Backend& backend() const { return *backend_; }
  const std::string& device_note() const { return device_note_; }  // ChosenBackend::note
  const ExecutorSpec& spec() const { return spec_; }
  int32_t context() const { return spec_.max_context; }
  const WeightTypes& weight_types() const { return weight_types_; }  // of what was quantized on load

  bool has_tokenizer() const { return tokenizer_ != nullptr; }
  // Throws Error{kBadInput} when the checkpoint has none.
  const Tokenizer& tokenizer() const;
  std::shared_ptr<const Tokenizer> shared_tokenizer() const;
  // Parsed at the first call; nullptr when the checkpoint has none. Throws Error when it cannot be
  // understood.
  const ChatTemplate* chat_template();
  // Where generation ends: the config's, the tokenizer's.
  const std::vector<int32_t>& end_tokens() const { return end_tokens_; }

  // The names of EngineOptions::adapters in their order; what blocks computed with one are named for.
  const std::vector<std::string>& adapter_names() const { return adapter_names_; }
  size_t adapter_bytes() const { return adapter_bytes_; }
  std::string_view adapter_identity(int32_t adapter) const;  // empty for -1
  int32_t adapter_number(const std::string& name) const;     // -1 for no name; Error{kBadInput} for another

  // SequenceSlice::sparse_pages of a request: 0 for full attention. Throws Error for a mode or a budget that
  // is none, or that this runtime has no page summaries for.
  int32_t sparse_pages(const std::string& attention, int32_t budget) const;
  // What blocks are named for beside their tokens and the salt: they differ with both.
  std::string block_variant(int32_t adapter, int32_t sparse_pages) const;
  // Slice::fp8_until of a prompt of so many tokens.
  int32_t fp8_until(size_t prompt_tokens) const {
    return fp8_prompts_ ? static_cast<int32_t>(prompt_tokens) : 0;
  }

  // Empty; to be destroyed before the runtime.
  kv::Sequence make_sequence();
  kv::Cache& cache() { return *cache_; }
  Executor& executor() { return *executor_; }
  // Do greedy_tokens() of the executor spare what its logits() would move? Ranks have parts of the
  // vocabulary.
  bool spares_logits() const { return (group_ != nullptr && pipeline_ == nullptr) || remote_ != nullptr; }
  RankFront* front() const { return front_.get(); }  // of ranks that this process started; else null
  // When those of a new group are there: they load their parts, and have no blocks yet. Nobody steps until
  // they are attached. Throw RanksLost.
  void attach_ranks();
  bool ranks_attached();

  // From the next step on the CPU computes, with pools of the same size and nothing in them: every sequence
  // is to be given up and everything remembered forgotten before that step. What the lost device had is not
  // touched again before the runtime's end. Throws Error where the CPU cannot take the model.
  void fall_back_to_cpu(int threads);

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
  void generate_greedy(kv::Sequence& sequence, int32_t token, std::span<int32_t> out);

  // The step itself, for callers who reserve before and advance after it as they like: logits as above,
  // unchecked. Nothing is allocated once the largest batch has been seen.
  std::span<const float> forward(std::span<const Slice> slices);
  // The same without waiting, for those who let the executor sample.
  void launch(std::span<const Slice> slices) { compute(slices); }
  // Throws for a row from which the device picked no token (SampledRow): what check_logits or the sampler
  // would.
  [[noreturn]] void explain_no_token(int32_t sampled) const;
  // The hidden state of one row of that step (all slices' tokens in order) behind the last norm, [hidden].
  void read_hidden(int32_t row, std::span<float> to) const { stepping_->read_hidden(*executor_, row, to); }
  // How the model's makers pool hidden states; the scores of its head, of a pooled state [hidden].
  Pooling pooling() const;
  std::vector<float> scores_of(std::span<const float> pooled) const { return head_->scores(pooled); }
  // What is said of images (ModelInfo), and what reads them: null where none can be.
  const ModelInfo::Images& images() const { return images_; }
  ImageReader* image_reader() const { return image_reader_.get(); }
  // The tokens of an image see one another, and are computed in one step.
  bool images_see_both_ways() const { return images_see_both_ways_; }
  // Throws Error{kBadInput} naming the damage in the file when a row of logits holds a NaN.
  void check_logits(std::span<const float> row) const;
  void check_generates() const;                              // Error{kUnsupported} for a text encoder
  void check_tokens(std::span<const int32_t> tokens) const;  // Error{kBadInput} for ids out of range

  // Feeds any number of tokens in chunks of spec().max_tokens; logits of the last one.
  std::span<const float> prefill(kv::Sequence& sequence, std::span<const int32_t> tokens);

  // Lengthens a sequence without computing: its last block of keys and values again and again. What it then
  // says is nonsense, but takes the time that it would. `sequence` ends with a block, `tokens` are whole
  // blocks.
  void repeat_last_block(kv::Sequence& sequence, int32_t tokens);

 private:
  Runtime() = default;
  // The parts of open(), in order. What they find is noted in `setup` for those behind.
  AdapterSet open_adapters(const ModelConfig& config, const EngineOptions& options, RuntimeSetup& setup);
  void open_device(const ModelConfig& config, const EngineOptions& options, RuntimeSetup& setup,
                   const AdapterSet& adapters);
  RankShare share_before_ranks(const ModelConfig& config, const EngineOptions& options, RuntimeSetup& setup);
  RankShare join_ranks(const ModelConfig& config, const EngineOptions& options, RuntimeSetup& setup);
  void load_model(const EngineOptions& options, const RuntimeSetup& setup, AdapterSet adapters);
  void load_tokenizer_of(const ModelConfig& config);
  void open_images(const ModelConfig& config, const EngineOptions& options, const RuntimeSetup& setup);
  void start_ranks(const EngineOptions& options, const RuntimeSetup& setup);
  void make_executor(const RuntimeSetup& setup);
  void make_cache(const ModelConfig& config, const EngineOptions& options, const RuntimeSetup& setup);
  void compute(std::span<const Slice> slices);
  void add_with_images(const SequenceSlice& whole, std::span<const ImagePlace> images);
  void add_given(const SequenceSlice& whole, const ImagePlace& image);
  void add_rope_positions(const SequenceSlice& whole, std::span<const ImagePlace> images);
  void compute_inputs(std::span<const StepInput> inputs);
  void advance(std::span<const StepInput> inputs);
  int32_t prompt_until(const StepInput& input) const;
  std::span<const float> checked_logits();
  void check_input(const StepInput& input) const;

  io::Checkpoint checkpoint_;                  // first: everything below points into its mapping
  std::shared_ptr<dist::Communicator> group_;  // the ranks that share the model, and this one's part; or none
  std::optional<dist::Shares> shares_;
  std::optional<RankGroups> groups_;
  std::unique_ptr<RankFront> front_;  // the ranks that compute in this process's stead, or none
  std::unique_ptr<Backend> backend_;
  std::string device_note_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Backend> fallback_backend_;  // after fall_back_to_cpu(), and its model
  std::unique_ptr<Model> fallback_model_;
  const Model* stepping_ = nullptr;  // one of both: what steps run
  ExecutorSpec spec_;
  std::unique_ptr<Executor> lost_executor_, executor_;
  PipelineLeader* pipeline_ = nullptr;  // the same, or what it wraps, where layers are other ranks'
  RemoteExecutor* remote_ = nullptr;    // the same, where all of the model is
  std::unique_ptr<ExecutorStore> store_;
  std::unique_ptr<kv::Cache> cache_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::string tokenizer_error_;
  std::optional<ChatTemplate> chat_template_;
  std::vector<int32_t> end_tokens_;
  WeightTypes weight_types_;
  std::vector<std::string> adapter_names_, adapter_identities_;
  size_t adapter_bytes_ = 0;
  std::optional<ClassifierHead> head_;
  ModelInfo::Images images_;
  std::unique_ptr<ImageReader> image_reader_;
  bool images_see_both_ways_ = true;
  // Of step(), step_greedy(), generate_greedy() and prefill(), and of requests that do not say.
  int32_t own_adapter_ = -1, own_sparse_pages_ = 0;
  bool fp8_prompts_ = false;  // EngineOptions::compute
  int32_t budget_pages_ = 0;  // of requests that want sparse attention and say no more
  // Reused by every step.
  Buffer<int32_t> tokens_, logit_rows_, sampled_rows_, greedy_, named_;
  Buffer<SequenceSlice> batch_;
  std::vector<GivenRow> given_;
  std::vector<int32_t> rope_positions_;  // Batch's
  Buffer<Slice> step_slices_;
};

}  // namespace millrace
