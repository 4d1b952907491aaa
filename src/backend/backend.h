// Backend: the seam between models and devices, and the only one. A model names operations; a device decides
// how to run and fuse them. Two objects:
//   Backend  - a device: takes weights in (mapped, kept or repacked) and makes executors.
//   Executor - one model's working memory on that device: the residual stream, the KV pools, the logits.
//
// An executor runs steps. A step is a ragged batch: a flat list of tokens with, per sequence, how long its
// context already is and where its KV blocks are. Prefill, chunked prefill, decode and verification are all
// the same call. Operations read and write *slots* that the executor owns, so that the residual stream can
// live in whatever form the device likes:
//
//   embed            tokens            -> residual                      [tokens, hidden]
//   layer_inputs     tokens, residual  -> inputs of layers              [tokens, layers * size] (Gemma 4)
//   norm_qkv         residual          -> query, key, value             [tokens, heads * head_dim] ...
//   norm_latent_qkv  residual          -> query, key                    (latent attention)
//   rope_append_kv   query, key, value -> query; key, value into the pool
//   attend           query, pool       -> attention                     [tokens, heads * head_dim]
//   norm_mix         residual          -> mix                           (layers with a state, in place of the
//   mix              mix, pool         -> attention                      three above)
//   time_mix         residual, pool    -> attention                     (RWKV 7)
//   project_add      attention         -> residual +=
//   channel_mix_add  residual, pool    -> residual +=                   (RWKV 7)
//   ffn_add          residual          -> residual +=                   (dense layers)
//   route            residual          -> routing                       (expert layers)
//   experts_add      residual, routing -> residual +=
//   end_layer        residual, inputs  -> residual                      (Gemma 4)
//   add_given        given rows        -> residual +=                   (Qwen 3 VL)
//   norm_residual    residual          -> residual                      (encoders)
//   norm_logits      residual          -> logits                        [logit rows, vocabulary]
//
// Same bits: what a token gets does not depend on the other rows of the batch, on how its prompt was cut, or
// on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/executor_spec.h"
#include "backend/op_features.h"
#include "backend/operations.h"
#include "backend/tuning.h"
#include "base/paging.h"
#include "base/sampling_math.h"
#include "base/topology.h"
#include "dist/communicator.h"
#include "dist/shares.h"
#include "kernels/quant/kv_types.h"
#include "millrace/error.h"
#include "tensor/tensor_view.h"

namespace millrace {

// ---------------------------------------------------------------- sampling

// How one row of logits becomes a token: SamplingParams (millrace/sampling.h) as plain data, what was seen so
// far, and the random number of this draw. The rule is sample::Sampler's (base/sampling_math.h has the
// arithmetic): the same logits and the same numbers give the same token.
struct SampleRow {
  bool wanted = false;  // else the row's logits will be read
  bool draw = false;    // else the likeliest, the lowest id among equals
  float scale = 1.0f;   // of logits: 1 / temperature
  int32_t top_k = 0;
  float top_p = 1.0f, min_p = 0.0f;
  double uniform = 0.0;  // in [0, 1)
  float repetition_penalty = 1.0f, presence_penalty = 0.0f, frequency_penalty = 0.0f;
  std::span<const TokenCount> counted;  // what the penalties apply to; every token once
  std::span<const TokenBias> bias;      // every token once
  std::span<const uint64_t> allowed;    // bit t % 64 of word t / 64; empty: every token is
  int32_t logprobs = -1;                // so many likeliest, 0: the chosen token's only; -1: none at all

  // A device that samples does rows like this itself, whatever it leaves to the host.
  static constexpr int32_t kMostLogprobs = 20;
  static constexpr size_t kMostBiases = 1024;
  bool simple() const {
    return counted.empty() && allowed.empty() && bias.size() <= kMostBiases && logprobs <= kMostLogprobs;
  }
  bool plain_greedy() const { return !draw && simple() && bias.empty() && logprobs < 0; }
};

struct SampledRow {
  static constexpr int32_t kNotANumber = -1;  // in place of a token: one of the logits is NaN
  static constexpr int32_t kNothing = -2;     // none of them is above -infinity
  static constexpr int32_t kLeft = -3;        // this device does not do what was asked for: read the logits
  int32_t token = kLeft;
  // With logprobs >= 0, of the logits as the model gave them:
  float chosen = 0.0f, largest = 0.0f;  // logits
  uint64_t units = 0;                   // sum of e^(logit - largest), sampling::units_of each
  struct Top {
    int32_t token;
    float logit;
  };
  std::span<const Top> top;  // likeliest first, ties to the lower id
};

// ---------------------------------------------------------------- executor

// Operations by name, and how long one took where a device times them.
enum class Operation {
  kEmbed,
  kNormQkv,
  kRopeAppend,
  kAttend,
  kProject,
  kFfn,
  kRoute,
  kExperts,
  kLogits,
  kPick,
};
struct TimedOperation {
  Operation operation;
  double seconds;
};

enum class Slot { kResidual, kQuery, kKey, kValue, kAttention, kLogits };

class Executor {
 public:
  virtual ~Executor() = default;

  // Starts a step; the batch's memory must outlive it. Plans attention once for all layers.
  virtual void begin(const Batch& batch) = 0;
  virtual void embed(const Embed& op) = 0;
  // Behind embed(), and behind each layer; devices without them say so (OpFeature::kLayerInputs).
  virtual void layer_inputs(const LayerInputs& /*op*/) {
    throw Error(ErrorCode::kUnsupported, "this device has no inputs of layers");
  }
  virtual void end_layer(const EndLayer& /*op*/) {
    throw Error(ErrorCode::kUnsupported, "this device has no inputs of layers");
  }
  // Behind layer `layer`: x += values[1 + layer] of each of Batch::given that has so many. Nothing where
  // there are none, as on devices without images.
  virtual void add_given(int /*layer*/) {}
  virtual void norm_qkv(const NormQkv& op) = 0;
  // For models with latent attention, instead of norm_qkv; devices without it say so (OpFeature::kLatent).
  virtual void norm_latent_qkv(const NormLatentQkv& /*op*/) {
    throw Error(ErrorCode::kUnsupported, "this device has no latent attention");
  }
  virtual void rope_append_kv(const Rope& op) = 0;
  virtual void attend(const Attend& op) = 0;
  virtual void norm_mix(const NormMix& op) = 0;
  virtual void mix(const StateMix& op) = 0;
  // For RWKV 7; devices without them say so (OpFeature::kTokenShift).
  virtual void time_mix(const TimeMix& /*op*/) {
    throw Error(ErrorCode::kUnsupported, "this device has no time mix");
  }
  virtual void channel_mix_add(const ChannelMix& /*op*/) {
    throw Error(ErrorCode::kUnsupported, "this device has no channel mix");
  }
  virtual void project_add(const Projection& op) = 0;
  virtual void ffn_add(const Ffn& op) = 0;
  virtual void route(const Route& op) = 0;
  virtual void experts_add(const Experts& op) = 0;
  virtual void norm_residual(const Norm& op) = 0;
  virtual void norm_logits(const Logits& op) = 0;
  // [logit rows, vocabulary] of the last step, readable until the next begin().
  virtual std::span<const float> logits() = 0;
  // Of a rank that has a part of the vocabulary: the logits of it, [logit rows, part], likewise.
  virtual std::span<const float> own_logits() { return logits(); }
  // [logit rows]: the token of the largest logit, the lowest among equals; -1 when one is NaN. Readable until
  // the next begin(). Empty: this device leaves it to whoever reads the logits.
  virtual std::span<const int32_t> greedy_tokens() { return {}; }

  // Does sample() pick tokens, of rows that are simple() at least?
  virtual bool samples() const { return false; }
  // Is a step's launch over long before its work is, so that another may be launched ahead of its tokens?
  virtual bool works_ahead() const { return samples(); }
  // Sets to work what was asked for so far, on a device that would else wait for more.
  virtual void start() {}
  // Starts picking the tokens of this step's logit rows, [logit rows]; what the rows point to is read before
  // it returns. False: this device leaves it to whoever reads the logits. A row's token does not depend on
  // the other rows.
  virtual bool sample(std::span<const SampleRow> /*rows*/) { return false; }
  // Waits for them: of the earliest step that was sample()d and not yet asked for. At most one step may be
  // begun (and sampled) between a step's sample() and this; readable until the second begin() after it.
  virtual std::span<const SampledRow> sampled() { return {}; }
  // logits() of which only these rows, ascending, have to be there.
  virtual std::span<const float> logits_of(std::span<const int32_t> /*rows*/) { return logits(); }

  // The final norm of one row of the last step, [hidden], until the next begin(): what embeddings are made
  // of. For backends that say so (gives_hidden_states); any number of threads at once.
  virtual void read_hidden(const Norm& /*norm*/, int32_t /*row*/, std::span<float> /*to*/) {
    throw Error(ErrorCode::kUnsupported, "this device gives no hidden states");
  }

  // The bytes of one KV block (spec.kv_block_bytes(group)), for the cache's tiers and copy-on-write. Not
  // during a step; in order with the steps before and after, whenever the bytes move. read_block has filled
  // `to` when finish_reads() returns, and `to` must be there until then; write_block has consumed `from`.
  virtual void read_block(int group, int32_t block, std::span<std::byte> to) = 0;
  virtual void write_block(int group, int32_t block, std::span<const std::byte> from) = 0;
  virtual void copy_block(int group, int32_t from, int32_t to) = 0;
  virtual void finish_reads() {}

  // For a device whose calls return before their work is done: from here on each operation is timed by itself
  // (steps take longer so), and operation_times() waits and gives those of the steps since it was last asked.
  // Operations that one kernel does together are the first one's. False: calls take as long as their work.
  virtual bool time_operations() { return false; }
  virtual std::vector<TimedOperation> operation_times() { return {}; }

  // A slot as float32 [rows, columns], out and in: tests, calibration, who hands a residual stream over.
  virtual std::vector<float> read_slot(Slot slot) = 0;
  virtual void write_slot(Slot slot, std::span<const float> values) = 0;
};

// ---------------------------------------------------------------- device

struct BackendOptions {
  int threads = 0;               // 0: one per core this process may use
  Topology topology = {};        // empty: this machine's
  double memory_fraction = 0.9;  // of a device's own memory that is free, how much we may take
  size_t memory_bytes = 0;       // not 0: so much of it instead
  // This rank's part of a model that ranks share, and for rows of matrices (not for stages of a pipeline)
  // the group that exchanges what they make of them. They must outlive the backend.
  dist::Communicator* group = nullptr;
  const dist::Shares* shares = nullptr;
  // The how-manieth of the ranks on this host it is, and how many those are: they share its GPUs.
  int local_rank = 0, local_ranks = 1;
  // Products of tokens before SequenceSlice::fp8_until are of E4M3 codes: of matrices of layers, not of
  // experts, routers and logits. A gate and what it multiplies are rounded to bf16 before their activation.
  bool fp8_prompts = false;
};

// How ranks exchange what their devices made, as measured: an all_gather of 4 bytes each, and the bytes of
// all ranks that a rank has after a long one, over its time.
struct DeviceLinkSpeed {
  std::string name;  // "staged over mpi", "nccl 2.28.3"
  double latency_s = 0, bytes_per_s = 0;
};

struct DeviceEnergy {
  std::string counter;  // "gpu 00000000:3B:00.0"
  double joules = 0.0;  // since some moment in the past
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;    // "cpu", "reference", "cuda"
  virtual std::string description() const = 0;  // "cpu, neon+dotprod, 2 threads"
  virtual std::string_view isa() const = 0;     // "neon_dotprod"; the device's architecture on a GPU
  virtual int threads() const = 0;
  virtual DType default_kv_type() const = 0;
  // Rows of a step beyond which a prompt gains little by longer chunks.
  virtual int32_t default_step_tokens() const { return 512; }
  virtual bool supports_kv_type(DType type) const = 0;
  virtual bool gives_hidden_states() const { return false; }  // of its executors: read_hidden
  // Bytes a second that its own memory is read with, measured now; nothing: it uses the machine's.
  virtual std::optional<double> measure_read_bandwidth() { return std::nullopt; }
  // Operations a second of the products that prompts are made of, measured now, where a device has a peak of
  // its own for them; a multiply-add counts two.
  virtual std::optional<double> measure_products() { return std::nullopt; }
  // Energy that the device has used, by a counter of its own; nothing: it has none. Any thread.
  virtual std::optional<DeviceEnergy> energy() const { return std::nullopt; }
  // Of a rank with a group, collective: the ways its device has to those of the others. None: ranks exchange
  // what lies in the machine's memory (dist::measure_link).
  virtual std::vector<DeviceLinkSpeed> measure_device_links() { return {}; }
  // Of a rank: which part of the weights load_weight expects. Absent: all of them.
  virtual const dist::Shares* shares() const { return nullptr; }
  // What of an architecture's operations this device does not do (op_features.h): none, or Model::load
  // refuses with their names.
  virtual OpFeatures lacks() const { return {}; }
  // What of the model is where, in words, of a device that is two (mixed/).
  virtual std::string placement() const { return {}; }
  // Bytes for weights, pools and workspace on a device with memory of its own; nothing: it uses the
  // machine's.
  virtual std::optional<size_t> own_memory() const { return std::nullopt; }

  // Bytes this backend will hold for a weight beyond the file's mapping; asked before anything is loaded.
  // A kMatrix for which that is not 0 will be copied. `before`: what this has said of the weights that will
  // be loaded before it, in all; copies that only speed things up end where memory does. Of a kDequantized:
  // without the second copy.
  virtual size_t weight_bytes(const TensorView& view, WeightUse use, size_t before) const = 0;
  // Bytes of a second copy of a kMatrix that products of many rows read instead of the first; 0: this device
  // makes none. Whoever knows the whole model decides whether they are made (plan_weights).
  virtual size_t dequantized_bytes(const TensorView& /*view*/) const { return 0; }
  // Whether a kMatrix that prompts multiply is loaded as kFp8; weight_bytes has its bytes.
  virtual bool multiplies_fp8(const TensorView& /*view*/) const { return false; }
  // The view's memory must outlive the weight unless it is copied. Throws Error{kUnsupported} naming the
  // tensor for a type it lacks.
  virtual WeightPtr load_weight(const TensorView& view, WeightUse use) = 0;

  // The same of weights whose place in the model is known.
  virtual size_t placed_bytes(const TensorView& view, WeightUse use, size_t before,
                              const WeightPlace& /*place*/) const {
    return weight_bytes(view, use, before);
  }
  virtual size_t placed_dequantized_bytes(const TensorView& view, const WeightPlace& /*place*/) const {
    return dequantized_bytes(view);
  }
  virtual WeightPtr load_placed(const TensorView& view, WeightUse use, const WeightPlace& /*place*/) {
    return load_weight(view, use);
  }
  // Of weights there: does what is held of them lie in the machine's memory, whatever own_memory() says?
  virtual bool in_machine_memory(const WeightPlace& /*place*/) const { return !own_memory(); }

  // Of a block's part of a layer, the bytes of a head's keys, which come before all values: half of what the
  // head has, unless scales of both lie with the keys.
  virtual size_t key_head_bytes(const ExecutorSpec& spec) const {
    return kBlockTokens * kv_head_bytes(spec.kv_type, spec.head_dim);
  }

  virtual size_t workspace_bytes(const ExecutorSpec& spec) const = 0;  // of an executor, without the KV pools
  virtual std::unique_ptr<Executor> make_executor(const ExecutorSpec& spec) = 0;

  // Variants of kernels, where there are any to choose from (tuning.h). use_tuning throws Error{kBadInput}
  // for a table with names it does not know; before the first executor is made.
  virtual std::optional<TuningTarget> tuning_target() const { return std::nullopt; }
  virtual void use_tuning(const TuningTable& /*table*/) {}
  virtual TuningTable autotune(std::span<const TuningShape> /*shapes*/,
                               const AutotuneProgress& /*progress*/) {
    throw Error(ErrorCode::kUnsupported, "this device has no kernels to choose from");
  }

  // Runs body(begin, end) over [0, count) on the device's host threads: loading, measuring bandwidth.
  virtual void parallel(int64_t count, const std::function<void(int64_t, int64_t)>& body) = 0;
};

// "cpu", "reference", "cuda", "cuda:1" (another GPU). An unknown name or a device this machine lacks throws
// Error naming the choices.
std::unique_ptr<Backend> make_backend(std::string_view name, const BackendOptions& options);

}  // namespace millrace
