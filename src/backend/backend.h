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

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backend/adapter_table.h"
#include "backend/op_features.h"
#include "backend/tuning.h"
#include "base/paging.h"
#include "base/sampling_math.h"
#include "base/state_block.h"
#include "base/topology.h"
#include "dist/communicator.h"
#include "dist/shares.h"
#include "kernels/quant/kv_types.h"
#include "millrace/error.h"
#include "tensor/tensor_view.h"

namespace millrace {

// ---------------------------------------------------------------- the batch

struct SequenceSlice {
  int32_t first_row = 0;  // its tokens are rows [first_row, first_row + num_tokens) of the batch
  int32_t num_tokens = 0;
  int32_t context_len =
      0;  // tokens of this sequence already in the cache; the first new one has this position
  // tables[g][i] is the block of group g that holds positions [16 i, 16 i + 16); kNoBlock once out of the
  // window. Blocks for the new tokens are already there.
  std::array<const int32_t*, kMaxKvGroups> tables{};
  int32_t adapter = -1;  // of Batch::adapters, whose updates its rows get; -1: none
  // Of two texts, the position where the second begins: its tokens are of type 1 (Embed::types).
  int32_t second_text = INT32_MAX;
  // Its tokens, all those of an image that were not there before, see one another: each sees up to the last.
  bool both_ways = false;
  // Sparse attention (base/sparse_pages.h): layers of full attention read so many pages for each token, all
  // of them while there are no more; 0: all. Only where ExecutorSpec::page_summaries; rows that see
  // both_ways read everything.
  int32_t sparse_pages = 0;
};

// A row of the residual stream that is given, not looked up: a part of an image.
struct GivenRow {
  int32_t row = 0;
  const float* values = nullptr;  // [1 + further][hidden]
  int32_t further = 0;            // rows that add_given() adds behind the first layers (DeepStack)
};

struct Batch {
  std::span<const int32_t> tokens;           // [num_tokens]
  std::span<const SequenceSlice> sequences;  // cover the rows, in order
  std::span<const int32_t> logit_rows;       // rows whose logits are wanted, ascending
  // Empty, or for each token the logit row of the step before whose sampled token it is; -1: `tokens` has it.
  // For executors that sample(): the step can start before anybody here knows those tokens.
  std::span<const int32_t> sampled_rows = {};  // [num_tokens]
  // Nobody will ask what the last layer makes of other rows than logit_rows (read_hidden, slots): behind its
  // keys and values an executor may leave them out.
  bool only_logits = false;
  // What embed() puts into these rows, ascending, in place of their tokens' (OpFeature::kImages).
  std::span<const GivenRow> given = {};
  // Empty, or by which positions a row is rotated, [num_tokens][3]: time, height and width of a part of an
  // image, three times the same of a text (Rope::axes). Empty: by where it is in its sequence.
  std::span<const int32_t> rope_positions = {};
  // Low-rank updates of products, each for the rows of the sequences that name its adapter: every product of
  // a Linear in norm_qkv, project_add, ffn_add, experts_add and norm_logits, y = W x + b, becomes y + B (A x)
  // before anything else is done to it, of experts with each one's A and B. Routers have none. nullptr: no
  // adapters.
  const AdapterTable* adapters = nullptr;
};

// ---------------------------------------------------------------- weights

enum class WeightUse {
  kMatrix,       // [out, in] or [experts, out, in]: y = W x
  kDequantized,  // [out, in], a kMatrix held a second time for prompts; only where dequantized_bytes is not 0
  kLookup,       // [vocabulary, hidden]: rows are looked up
  kEmbedding,    // the same, of a model without an output matrix: multiplied too
  kVector,       // norms, biases, sinks: becomes float32, read row by row
};

// A weight as its backend holds it. Models pass it around and never look inside.
class Weight {
 public:
  virtual ~Weight() = default;
  int64_t experts = 1, rows = 0, cols = 0;
  bool copied = false;  // all of it is in memory of its own: the view's may go
};
using WeightPtr = std::unique_ptr<const Weight>;

// Where in its model a weight stands, for a device that is two (mixed/): it goes by this.
struct WeightPlace {
  enum class Part { kEmbedding, kOutput, kLayer, kExperts };  // kExperts: of a layer, [experts, ..]
  Part part = Part::kOutput;
  int32_t layer = -1;
};

// ---------------------------------------------------------------- operations' parameters

// kRms: y = x / sqrt(mean(x^2) + eps) * weight. kRmsUnweighted: the same without weight. kLayer (LayerNorm):
// y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias. One without a weight is no norm: y = x.
struct Norm {
  const Weight* weight = nullptr;
  float eps = 1e-5f;
  const Weight* bias = nullptr;
  enum class Kind { kRms, kRmsUnweighted, kLayer } kind = Kind::kRms;
  bool present() const { return weight != nullptr || kind == Kind::kRmsUnweighted; }
};

struct Linear {
  const Weight* weight = nullptr;  // [out, in]
  const Weight* bias = nullptr;    // [out] or absent
};

struct Embed {                        // x = norm(table[token] * scale + positions[position] + types[type])
  const Weight* table = nullptr;      // [vocabulary, hidden]
  float scale = 1.0f;                 // Gemma's sqrt(hidden)
  const Weight* positions = nullptr;  // [max positions, hidden]: learned positions (GPT-2), or absent
  const Weight* types = nullptr;      // [types, hidden]: BERT's; types[1] behind SequenceSlice::second_text
  Norm norm = {};                     // absent in most
};

// kSilu: silu(g) * u. kGelu, kGeluTanh: the same with GELU by erf or by tanh. kReluSquared: max(g, 0)^2 * u.
// kClampedSwiglu (gpt-oss): g = min(g, limit), u = clamp(u, +-limit), g * sigmoid(alpha g) * (u + 1).
enum class Activation { kSilu, kClampedSwiglu, kGelu, kGeluTanh, kReluSquared };

// What every token brings to each layer besides the residual stream (Gemma 4): with x as embed() left it and
// layer l's columns [l * size, (l + 1) * size),
//   input_l = scale * (norm(projection_scale * (projection x)_l) + table_scale * table[token]_l)
struct LayerInputs {
  const Weight* table = nullptr;  // [vocabulary, layers * size]
  float table_scale = 1.0f;
  Linear projection;  // [layers * size, hidden]
  float projection_scale = 1.0f;
  Norm norm;  // over size
  float scale = 1.0f;
};

// x = scale * (x + norm_after(projection(act(gate x) * input_layer)))
struct EndLayer {
  int layer = 0;
  Linear gate, projection;  // [size, hidden], [hidden, size]; absent: x = scale * x
  Activation activation = Activation::kGeluTanh;
  Norm norm_after = {};
  const Weight* scale = nullptr;  // [1]; absent: 1
};

struct NormQkv {
  Norm norm;
  // Without k and v a layer reads the keys and values of another one (Gemma 4): the ExecutorSpec has both in
  // one place. k and v may be one matrix, whose product is then normed by k_norm and by v_norm.
  Linear q, k, v;
  Norm q_norm, k_norm;      // per head, over head_dim (Qwen 3); absent elsewhere
  Norm v_norm = {};         // the same (Gemma 4)
  int32_t head_dim = 0;     // of this layer, where layers differ (Gemma 4); 0: ExecutorSpec's
  bool norm_whole = false;  // q_norm and k_norm go over all heads at once (OLMo 2)
  // Of each head q has 2 head_dim rows: the query's, and those of a gate that attend() multiplies its output
  // by, as sigmoid(gate) (Qwen 3 Next).
  bool gated = false;
};

// Latent attention (DeepSeek V2), absorbed: what is cached of a token is one key that all heads share, and
// its values are that key too. With n = norm(x), rank dimensions of the latent, and per head h
//   q_h = q(norm_q(q_a n))_h                    [nope + rope], or q(n) without q_a
//   key = [kv_a(n)[rank ..], norm_kv(kv_a(n)[.. rank])]   [rope + rank]: its first `rope` are rotated
//   query_h = [q_h[nope ..], k_b_h q_h[.. nope]]          [rope + rank]
// the scores are those of keys k_b_h^T latent, and Projection::head_values makes values of what was attended.
struct NormLatentQkv {
  Norm norm;
  Linear q_a = {};      // [q_rank, hidden]; absent: q reads the normed input
  Norm q_a_norm = {};   // over q_rank
  Linear q;             // [heads * (nope + rope), q_rank or hidden]
  Linear kv_a;          // [rank + rope, hidden]
  Norm kv_a_norm = {};  // over rank
  Linear k_b;           // [heads, rank, nope]
  // The indexer (DeepSeek 3.2; LatentShape::index_top): attend() reads the index_top tokens whose
  //   score(t) = sum over index heads i of index_weights(n)_i * max(0, index_q(norm_q(q_a n))_i .
  //   index_key(t))
  // is largest, of equals the earlier, for all heads alike, and every token while there are no more. The
  // first `rope` dimensions of its queries and keys are rotated, in halves whatever Rope says.
  Linear index_q = {};        // [index_heads * index_dim, q_rank]; absent: every token is read
  Linear index_k = {};        // [index_dim, hidden]
  Norm index_k_norm = {};     // over index_dim: index_key = norm(index_k n), which is cached beside the key
  Linear index_weights = {};  // [index_heads, hidden]
};

struct Rope {
  int layer = 0;
  // [rotary_dims / 2] angle per position; scaling (llama3, YaRN) is in here. Empty: nothing is rotated.
  std::span<const float> inv_freq;
  float magnitude = 1.0f;    // multiplies cos and sin (YaRN)
  bool interleaved = false;  // pairs (2i, 2i+1) as GGUF's llama files want; else (i, i + rotary_dims/2)
  // Of Batch::rope_positions, where there are any, which one turns a pair, 0 to 2: [rotary_dims / 2]. Empty:
  // the first.
  std::span<const uint8_t> axes = {};
  // Queries grow with the logarithm of their position (Llama 4, Ministral 3):
  // q *= 1 + scale * log(1 + floor((position + offset) / every)).
  struct Growth {
    float scale = 0.0f, every = 1.0f;  // scale 0: they do not
    int32_t offset = 0;
  } growth = {};
  bool appends = true;  // false: keys and values are another layer's (NormQkv), queries alone are rotated
};

struct Attend {
  int layer = 0;
  int32_t window = 0;             // a token sees itself and the window - 1 before it; 0: everything
  float scale = 1.0f;             // of the scores
  const Weight* sinks = nullptr;  // [heads]: joins the softmax's denominator, contributes no value
  float softcap = 0.0f;           // scores become softcap * tanh(score / softcap); 0: they stay (Gemma 2)
  // Instead of a window: a token sees what is in its chunk of the context, [chunk * i, chunk * (i + 1)), up
  // to itself (Llama 4); 0: no chunks.
  int32_t chunk = 0;
  // Encoders: a token also sees those behind it, window - 1 of them or all. A sequence is then one step's.
  bool bidirectional = false;
  bool gated = false;  // NormQkv::gated
};

// ---- layers with a state (base/state_block.h): linear attention and state-space models

// Where the columns of heads are in a row: those of head h begin at
// first + h / per_group * group_stride + h % per_group * dim.
struct HeadColumns {
  int32_t first = 0, heads = 0, dim = 0;
  int32_t per_group = 1, group_stride = 0;
  float scale = 1.0f;  // what they are multiplied by (Falcon H1)
  // All side by side.
  static HeadColumns plain(int32_t first, int32_t heads, int32_t dim, float scale = 1.0f) {
    return {first, heads, dim, heads > 0 ? heads : 1, 0, scale};
  }
  int32_t at(int32_t head) const { return first + head / per_group * group_stride + head % per_group * dim; }
};

// What a layer with a state is made of: products of n = norm(x), side by side in a row, whose columns become
// the rows of StateShape: queries, keys and values, which are convolved, a gate, and for each value head a
// step and a beta. Parts with no heads are not there.
struct NormMix {
  Norm norm;
  std::array<Linear, 6> in;
  // Products of products, whose columns come behind those of `in`: of columns [first, first + in) of the row
  // (Kimi Linear's gate and steps, of low rank).
  struct Behind {
    Linear by;
    int32_t first = 0;
  };
  std::array<Behind, 2> behind = {};
  HeadColumns query, key, value, gate, step, beta;
  HeadColumns value_by = {};  // the values are multiplied by these (LFM 2)
};

// The convolution, and what becomes of it:
// kGatedDelta: the gated delta rule. Queries and keys are normed to length 1, queries divided by
// sqrt(key_dim);
//   decay = exp(a softplus(step + step_bias)), beta = sigmoid(beta); S = decay S, S += k (beta (v - S^T
//   k))^T, o = S^T q; y = norm(o) silu(gate), or norm(o) sigmoid(gate). With StateShape::channel_decay a row
//   of S has a decay of its own, and step_bias is [value heads][key_dim].
// kSelectiveScan: Mamba-2. step = clamp(softplus(step + step_bias)), decay = exp(a step);
//   S = decay S + k (step v)^T, o = S^T q + d v; y = norm(o silu(gate)), or norm(o) silu(gate).
// kConvolution: y = gate * what is convolved.
struct StateMix {
  int layer = 0;
  enum class Kind { kGatedDelta, kSelectiveScan, kConvolution } kind = Kind::kGatedDelta;
  const Weight *conv = nullptr, *conv_bias = nullptr;  // [channels, taps]; [channels], or absent
  // Where each has its own, `conv` is that of the queries, [keys, taps]; these [keys, taps], [values, taps].
  const Weight *conv_keys = nullptr, *conv_values = nullptr;
  bool conv_silu = true;
  const Weight *a = nullptr, *step_bias = nullptr, *d = nullptr;  // [value heads]; the last two may be absent
  float step_min = 0.0f, step_max = 0.0f;                         // of kSelectiveScan
  Norm norm = {};  // kGatedDelta: [value_dim], of each head; else [values], of norm_size columns each
  int32_t norm_size = 0;
  bool norm_before_gate = true;
  bool gate_sigmoid = false;  // of kGatedDelta
};

// RWKV 7's time mix (Peng et al. 2025), all of it before the output matrix. n = norm(x), n' that of the token
// before it (zeros before the first), and x_i = n + (n' - n) shift_i for each of six inputs. With
// low(p, f, x) = p.up f(p.down x), of each head of key_dim columns
//   r = r x_r;  k = k x_k;  v = v x_v;  in layers behind the first v += (v_first - v) sigmoid(low(value,
//   x_v)) decay = exp(-e^-0.5 sigmoid(low(decay, tanh, x_w)));  a = sigmoid(low(rate, x_a));  g = low(gate,
//   sigmoid, x_g);  c = k k_k / |k k_k|;  k = k (1 + (a - 1) k_a) S = diag(decay) S - (a c) (S^T c)^T + k
//   v^T;  o = S^T r y = (head_norm(o) + (r . (r_k k)) v) g
// v_first: v of the first layer, of this step's rows.
struct TimeMix {
  int layer = 0;
  bool first = false;  // the layer whose values the others mix in
  Norm norm;
  const Weight* shift = nullptr;  // [6, hidden]: of r, decay, k, v, a, g
  Linear r, k, v;                 // [hidden, hidden]
  struct LowRankProduct {
    Linear down, up;  // [rank, hidden], [hidden, rank] with a bias or without
  };
  LowRankProduct decay, rate, value, gate;                      // value: absent in the first layer
  const Weight *k_k = nullptr, *k_a = nullptr, *r_k = nullptr;  // [hidden]
  Norm head_norm = {};                                          // kLayer, of each head; [hidden]
};

// RWKV 7's channel mix: x += value(max(key(n + (n' - n) shift), 0)^2), n and n' as above, of its own norm.
struct ChannelMix {
  int layer = 0;
  Norm norm;
  const Weight* shift = nullptr;  // [hidden]
  Linear key, value;              // [ffn, hidden], [hidden, ffn]
};

// x += scale * norm_after(W y + bias), y: what attention made.
struct Projection {
  Linear linear;
  // Latent attention: y is first made of what a head attended to, [heads][rope + rank], without its rotated
  // dimensions, by a matrix of its own: [heads, value, rank]. Absent in most.
  Linear head_values = {};
  Norm norm_after = {};  // absent in most (Gemma 2, OLMo 2)
  float scale = 1.0f;    // Granite's residual multiplier
};

struct Ffn {  // x += scale * norm_after(down(act(gate n) * (up n))), n = norm(x)
  Norm norm;
  Linear gate, up, down;  // without a gate (GPT-2): down(act(up n))
  Activation activation = Activation::kSilu;
  Norm norm_after = {};
  float scale = 1.0f;
};

struct Route {
  Norm norm;
  Linear router;  // [experts, hidden]
  int experts_per_token = 0;
  // kSoftmaxChosen: softmax over the chosen logits (gpt-oss). kSoftmaxAll: softmax over all, then choose.
  // kSigmoid: the sigmoid of each (Llama 4); kSigmoidRenormalized: these divided by the sum of the chosen.
  enum class Weighting {
    kSoftmaxChosen,
    kSoftmaxAll,
    kSoftmaxAllRenormalized,
    kSigmoid,
    kSigmoidRenormalized
  } weighting = Weighting::kSoftmaxChosen;
  float scale = 1.0f;  // of the weights
  // Gemma 4: of the scores before the softmax; [experts]: of the weights, behind it.
  float score_scale = 1.0f;
  const Weight* expert_scales = nullptr;
  // DeepSeek V3. [experts]: added to a score where experts are chosen, not where they are weighted.
  const Weight* choice_bias = nullptr;
  // Groups of experts: those of the largest two sigmoids in sum, or softmax's largest, are looked at.
  int groups = 1, groups_chosen = 1;
};

struct Experts {
  Linear gate, up, down;  // weights [experts, out, in], biases [experts, out]; without a gate: Ffn's rule
  Activation activation = Activation::kSilu;
  float alpha = 1.702f, limit = 7.0f;
  bool weigh_input = false;  // an expert's weight multiplies what goes in, not what comes out (Llama 4)
  // An expert that every token goes to, of its own size; its output times sigmoid(mix n) where that is there.
  struct Shared {
    Linear gate, up, down;  // [out, in]
    Linear mix;             // [1, hidden] (Qwen 2 MoE)
    float scale = 1.0f;     // of its output (Granite's residual multiplier)
  } shared = {};
  // Gemma 4: experts and the shared one each have norms before and behind them, and a third is behind their
  // sum: x += norm_after(shared_norm_after(shared(shared_norm(x))) + experts_norm_after(experts(norm(x)))).
  // Without `norm` all read what route() normed, and none of the others is there.
  Norm norm = {}, experts_norm_after = {}, shared_norm = {}, shared_norm_after = {}, norm_after = {};
};

struct Logits {
  Norm norm;
  Linear output;         // [vocabulary, hidden]
  float scale = 1.0f;    // of the logits (Granite)
  float softcap = 0.0f;  // logits become softcap * tanh(logit / softcap); 0: they stay
};

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

struct KvGroupSpec {
  int32_t window = 0;      // 0: full attention
  int32_t num_layers = 0;  // how many layers live in this group
  int32_t num_blocks = 0;  // pool size
  bool state = false;      // of layers with a state; the window is kStateWindow
  // Of its layers' heads, where groups differ in them (Gemma 4); 0: ExecutorSpec's.
  int32_t kv_heads = 0, head_dim = 0;
  // Ranks that the blocks are spread over (base/paging.h), num_blocks of all of them together; a group that
  // is not spread is whole on every rank.
  int32_t shelves = 1;
  int32_t states_apart = 0;  // of a state group: tokens between the states that the prefix cache keeps
  int32_t blocks_here() const { return num_blocks / shelves; }  // of each rank
};

// Of latent attention (NormLatentQkv); rank 0: a model has none.
struct LatentShape {
  int32_t rank = 0, rope = 0, nope = 0, value = 0;
  int32_t q_rank = 0;  // 0: queries are not compressed
  // Of the indexer, and how many tokens it chooses; 0: there is none.
  int32_t index_heads = 0, index_dim = 0, index_top = 0;
};

// Everything an executor sizes its memory by.
struct ExecutorSpec {
  int32_t max_tokens = 0;  // rows per step
  int32_t max_logit_rows = 0;
  int32_t max_context = 0;  // longest sequence
  int32_t hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, vocab = 0;
  int32_t ffn = 0;  // dense intermediate size, or a shared expert's; 0 without
  int32_t experts = 0, experts_per_token = 0, expert_ffn = 0;  // 0 without experts
  LatentShape latent = {};   // where there is any: kv_heads is 1, head_dim rope + rank
  int32_t adapter_rank = 0;  // the largest of any adapter; 0: no step has adapters
  DType kv_type = DType::kF32;
  std::vector<KvGroupSpec> kv_groups;
  // Where layer l's keys and values live, or its state; group -1: it keeps nothing. Layers that read another
  // one's keys and values have its place.
  struct LayerPlace {
    int32_t group = 0, index = 0;
  };
  std::vector<LayerPlace> layers;
  // Where the states of layers live that have keys and values too (Falcon H1), [layers]; empty: none has
  // both.
  std::vector<LayerPlace> beside;
  LayerPlace state_place(int layer) const {
    return (beside.empty() ? layers : beside)[static_cast<size_t>(layer)];
  }

  StateShape state = {};         // of the layers of a state group
  bool gated_attention = false;  // NormQkv::gated
  int32_t layer_input = 0;       // columns of a layer's input (LayerInputs); 0: there are none
  bool expert_norms = false;     // Experts::norm
  bool page_summaries = false;   // SequenceSlice::sparse_pages may be above 0

  // Key/value heads of a group's layers and their size. Those of the spec itself are the largest.
  int32_t kv_heads_of(int group) const {
    const int32_t own = kv_groups[static_cast<size_t>(group)].kv_heads;
    return own > 0 ? own : kv_heads;
  }
  int32_t head_dim_of(int group) const {
    const int32_t own = kv_groups[static_cast<size_t>(group)].head_dim;
    return own > 0 ? own : head_dim;
  }
  // Of a latent cache values are the keys.
  int32_t kv_parts() const { return latent.rank > 0 ? 1 : 2; }
  // A layer's part of a block of group g: [key, value][kv_heads][16][head_dim]; of a latent cache without the
  // values, and with an indexer's keys [16][index_dim] behind; of a state group a StateBlock, in float32.
  size_t kv_layer_bytes(int group) const {
    if (kv_groups[static_cast<size_t>(group)].state)
      return static_cast<size_t>(StateBlock(state).floats) * sizeof(float);
    const size_t index = latent.index_dim > 0 ? kv_head_bytes(kv_type, latent.index_dim) : 0;
    return kBlockTokens * (static_cast<size_t>(kv_parts()) * static_cast<size_t>(kv_heads_of(group)) *
                               kv_head_bytes(kv_type, head_dim_of(group)) +
                           index);
  }
  // One block of group g: [layers in group], contiguous.
  size_t kv_block_bytes(int group) const {
    return static_cast<size_t>(kv_groups[static_cast<size_t>(group)].num_layers) * kv_layer_bytes(group);
  }
  // Bounds of a block's keys beside it, for sparse attention: [layers in group][kv_heads][least, largest]
  // [head_dim in whole sixteens] in bf16, of groups with full attention. They follow from the block's bytes:
  // who copies or restores a block need not know of them.
  size_t page_summary_bytes(int group) const {
    const KvGroupSpec& g = kv_groups[static_cast<size_t>(group)];
    if (!page_summaries || g.state || g.window > 0) return 0;
    return static_cast<size_t>(g.num_layers) * static_cast<size_t>(kv_heads) * 2 *
           ((static_cast<size_t>(head_dim) + 15) / 16 * 16) * sizeof(uint16_t);
  }
  // What a block of the pool takes in all.
  size_t pool_block_bytes(int group) const { return kv_block_bytes(group) + page_summary_bytes(group); }
};

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
