// What a model tells a device, as plain data: the batch of a step, the weights that a backend holds for it,
// and the parameters of each operation of Executor (backend.h). What architectures differ in is in these.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>

#include "backend/adapter_table.h"
#include "base/gated_activation.h"
#include "base/paging.h"
#include "base/query_growth.h"
#include "base/state_block.h"

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
  // Its tokens at positions before this one are a prompt that FP8 products compute (WeightUse::kFp8).
  int32_t fp8_until = 0;
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
  kFp8,        // the same in FP8 (kernels/quant/fp8_patches.h), of a device with BackendOptions::fp8_prompts
  kLookup,     // [vocabulary, hidden]: rows are looked up
  kEmbedding,  // the same, of a model without an output matrix: multiplied too
  kVector,     // norms, biases, sinks: becomes float32, read row by row
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
  //   score(t) = sum over index heads i of
  //     index_weights(n)_i * max(0, index_q(norm_q(q_a n))_i . index_key(t))
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
  QueryGrowth growth = {};  // of the queries, whether they are rotated or not
  bool appends = true;      // false: keys and values are another layer's (NormQkv), queries alone are rotated
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

// The convolution, and what becomes of it.
// kGatedDelta: the gated delta rule. Queries and keys are normed to length 1, queries divided by
// sqrt(key_dim). With StateShape::channel_decay a row of S has a decay of its own, and step_bias is
// [value heads][key_dim].
//   decay = exp(a softplus(step + step_bias)), beta = sigmoid(beta)
//   S = decay S
//   S += k (beta (v - S^T k))^T
//   o = S^T q
//   y = norm(o) silu(gate), or norm(o) sigmoid(gate)
// kSelectiveScan: Mamba-2.
//   step = clamp(softplus(step + step_bias)), decay = exp(a step)
//   S = decay S + k (step v)^T
//   o = S^T q + d v
//   y = norm(o silu(gate)), or norm(o) silu(gate)
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
// low(p, f, x) = p.up f(p.down x), of each head of key_dim columns:
//   r = r x_r
//   k = k x_k
//   v = v x_v; in layers behind the first, v += (v_first - v) sigmoid(low(value, x_v))
//   decay = exp(-e^-0.5 sigmoid(low(decay, tanh, x_w)))
//   a = sigmoid(low(rate, x_a))
//   g = low(gate, sigmoid, x_g)
//   c = k k_k / |k k_k|
//   k = k (1 + (a - 1) k_a)
//   S = diag(decay) S - (a c) (S^T c)^T + k v^T
//   o = S^T r
//   y = (head_norm(o) + (r . (r_k k)) v) g
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

}  // namespace millrace
