// The operations of backend.h as calls of kernels/reference: slots, pools and nothing else.
#include "backend/reference/reference_executor.h"

#include <algorithm>

#include "backend/input_watcher.h"
#include "backend/mixed_part.h"
#include "backend/reference/reference_ops.h"
#include "backend/reference/reference_pools.h"
#include "base/check.h"
#include "kernels/quant/codec.h"
#include "kernels/reference/naive_attention.h"
#include "kernels/reference/naive_linear.h"
#include "kernels/reference/naive_moe.h"
#include "kernels/reference/naive_norm.h"
#include "kernels/reference/naive_rotary.h"
#include "kernels/reference/naive_rows.h"
#include "kernels/reference/naive_state.h"
#include "kernels/reference/naive_time_mix.h"

namespace millrace {
namespace {

using Floats = std::vector<float>;

class ReferenceExecutor final : public Executor, public WatchableExecutor, public MixedPart {
 public:
  explicit ReferenceExecutor(const ExecutorSpec& spec) : spec_(spec), pools_(spec) {
    const size_t rows = spec.max_tokens;
    residual_.resize(rows * spec.hidden);
    normed_.resize(rows * spec.hidden);
    query_.resize(rows * spec.heads * spec.head_dim);
    int64_t kv_cols = int64_t{spec.kv_heads} * spec.head_dim;
    for (int g = 0; g < static_cast<int>(spec.kv_groups.size()); ++g)
      kv_cols = std::max(kv_cols, int64_t{spec.kv_heads_of(g)} * spec.head_dim_of(g));
    key_.resize(rows * static_cast<size_t>(kv_cols));
    value_.resize(key_.size());
    attention_.resize(std::max(query_.size(), rows * static_cast<size_t>(spec.state.values())));
    if (spec.gated_attention) attention_gate_.resize(query_.size());
    mix_.resize(rows * static_cast<size_t>(spec.state.present() ? spec.state.mix_cols() : 0));
    chosen_.resize(rows * spec.experts_per_token);
    chosen_weight_.resize(chosen_.size());
    logits_.resize(static_cast<size_t>(spec.max_logit_rows) * spec.vocab);
  }

  void watch_inputs(InputWatcher* watcher) override { watcher_ = watcher; }

  void begin(const Batch& batch) override {
    MILLRACE_CHECK(batch.tokens.size() <= static_cast<size_t>(spec_.max_tokens));
    MILLRACE_CHECK(batch.logit_rows.size() <= static_cast<size_t>(spec_.max_logit_rows));
    batch_ = batch;
    rows_ = static_cast<int64_t>(batch.tokens.size());
    fp8_rows_.assign(batch.tokens.size(), false);
    for_each_token([&](const SequenceSlice& s, int64_t t, int32_t position) {
      fp8_rows_[static_cast<size_t>(t)] = position < s.fp8_until;
    });
  }

  void embed(const Embed& op) override {
    Floats row(spec_.hidden);
    for_each_token([&](const SequenceSlice& s, int64_t t, int32_t position) {
      float* x = residual_.data() + t * spec_.hidden;
      quant::dequantize_row(own(*op.table).view, batch_.tokens[t], x);
      reference::scale(op.scale, spec_.hidden, x);
      const auto add = [&](const Weight* rows, int64_t at) {
        if (rows == nullptr) return;
        quant::dequantize_row(own(*rows).view, at, row.data());
        reference::add(1.0f, row.data(), spec_.hidden, x);
      };
      add(op.positions, position);
      add(op.types, position >= s.second_text ? 1 : 0);
      norm(op.norm, x, spec_.hidden, x);
    });
    for (const GivenRow& given : batch_.given)
      std::copy_n(given.values, spec_.hidden, residual_.data() + int64_t{given.row} * spec_.hidden);
  }

  void layer_inputs(const LayerInputs& op) override {
    const int64_t cols = op.projection.weight->rows, size = spec_.layer_input;
    layer_inputs_.resize(rows_ * cols);
    Floats made(rows_ * cols);
    watch({&op.projection}, 0, residual_.data(), rows_);
    product(op.projection, residual_.data(), made.data());
    for (int64_t t = 0; t < rows_; ++t) {
      quant::dequantize_row(own(*op.table).view, batch_.tokens[t], &layer_inputs_[t * cols]);
      for (int64_t at = t * cols; at < (t + 1) * cols; at += size) {
        float* row = &made[at];
        reference::scale(op.projection_scale, size, row);
        norm(op.norm, row, size, row);
        reference::scaled_sum(op.scale, row, op.table_scale, size, &layer_inputs_[at]);
      }
    }
  }

  void end_layer(const EndLayer& op) override {
    if (op.gate.weight != nullptr) {
      const int64_t size = spec_.layer_input, cols = size * std::ssize(spec_.layers);
      Floats gated(rows_ * size), out(rows_ * spec_.hidden);
      watch({&op.gate}, 0, residual_.data(), rows_);
      product(op.gate, residual_.data(), gated.data());
      reference::FeedForward act{};
      act.activation = op.activation;
      for (int64_t i = 0; i < rows_ * size; ++i) {
        gated[i] =
            reference::activate(act, gated[i], layer_inputs_[i / size * cols + op.layer * size + i % size]);
      }
      watch({&op.projection}, 0, gated.data(), rows_);
      product(op.projection, gated.data(), out.data());
      add_block(out, op.norm_after, 1.0f);
    }
    if (op.scale != nullptr) reference::scale(*values_of(op.scale), rows_ * spec_.hidden, residual_.data());
  }

  void add_given(int layer) override {
    for (const GivenRow& given : batch_.given) {
      if (layer >= given.further) continue;
      reference::add(1.0f, given.values + int64_t{layer + 1} * spec_.hidden, spec_.hidden,
                     &residual_[int64_t{given.row} * spec_.hidden]);
    }
  }

  void norm_qkv(const NormQkv& op) override {
    norm_rows(op.norm);
    const Linear none;
    const bool keys = op.k.weight != nullptr;
    watch({&op.q, &op.k, op.v.weight == op.k.weight ? &none : &op.v}, 0, normed_.data(), rows_);
    if (op.gated) {
      gated_query(op.q);
    } else {
      adapted_linear(op.q, normed_.data(), query_.data());
    }
    const int64_t dim = op.head_dim > 0 ? op.head_dim : spec_.head_dim;
    norm_heads(op.q_norm, spec_.heads, dim, op.norm_whole, query_);
    if (!keys) return;
    adapted_linear(op.k, normed_.data(), key_.data());
    adapted_linear(op.v, normed_.data(), value_.data());
    norm_heads(op.k_norm, op.k.weight->rows / dim, dim, op.norm_whole, key_);
    norm_heads(op.v_norm, op.v.weight->rows / dim, dim, false, value_);
  }

  void norm_latent_qkv(const NormLatentQkv& op) override {
    norm_rows(op.norm);
    const LatentShape& s = spec_.latent;
    const int64_t q_dim = s.nope + s.rope, kv_dim = s.rank + s.rope, dim = spec_.head_dim;
    Floats compressed, q(rows_ * spec_.heads * q_dim), kv(rows_ * kv_dim), nope(rows_ * s.nope),
        absorbed(rows_ * s.rank);
    const float* input = normed_.data();
    if (op.q_a.weight != nullptr) {
      compressed.resize(rows_ * s.q_rank);
      watch({&op.q_a}, 0, input, rows_);
      reference::linear(linear_of(op.q_a), 0, input, rows_, compressed.data());
      for (int64_t t = 0; t < rows_; ++t)
        norm(op.q_a_norm, &compressed[t * s.q_rank], s.q_rank, &compressed[t * s.q_rank]);
      input = compressed.data();
    }
    watch({&op.q, &op.index_q}, 0, input, rows_);
    watch({&op.kv_a, &op.index_k, &op.index_weights}, 0, normed_.data(), rows_);
    reference::linear(linear_of(op.q), 0, input, rows_, q.data());
    reference::linear(linear_of(op.kv_a), 0, normed_.data(), rows_, kv.data());
    if (op.index_q.weight != nullptr) index_rows(op, input);
    for (int64_t t = 0; t < rows_; ++t) {
      std::copy_n(&kv[t * kv_dim + s.rank], s.rope, &key_[t * dim]);
      norm(op.kv_a_norm, &kv[t * kv_dim], s.rank, &key_[t * dim + s.rope]);
    }
    if (watcher_ != nullptr) watcher_->see_latent(*op.k_b.weight, s.rank, &key_[s.rope], rows_, dim);
    for (int64_t h = 0; h < spec_.heads; ++h) {
      const auto head = [&](int64_t t) { return &q[(t * spec_.heads + h) * q_dim]; };
      for (int64_t t = 0; t < rows_; ++t) std::copy_n(head(t), s.nope, &nope[t * s.nope]);
      watch({&op.k_b}, h, nope.data(), rows_);
      reference::linear(linear_of(op.k_b), h, nope.data(), rows_, absorbed.data());
      for (int64_t t = 0; t < rows_; ++t) {
        float* to = &query_[(t * spec_.heads + h) * dim];
        std::copy_n(head(t) + s.nope, s.rope, to);
        std::copy_n(&absorbed[t * s.rank], s.rank, to + s.rope);
      }
    }
  }

  void rope_append_kv(const Rope& op) override {
    const reference::Rotary rotary{op.inv_freq, op.magnitude, op.interleaved};
    const reference::PagedKv kv = pools_.kv_of(op.layer);
    const int group = spec_.layers[static_cast<size_t>(op.layer)].group;
    const int64_t dim = spec_.head_dim_of(group), kv_heads = spec_.kv_heads_of(group);
    for_each_token([&](const SequenceSlice& s, int64_t row, int32_t position) {
      float *query = &query_[row * spec_.heads * dim], *key = &key_[row * kv_heads * dim];
      const auto rotate = [&](float* x) {
        if (batch_.rope_positions.empty()) return reference::rotate(rotary, position, x);
        reference::rotate_on_axes(rotary, op.axes, &batch_.rope_positions[3 * row], x);
      };
      for (int h = 0; h < spec_.heads; ++h) rotate(query + h * dim);
      for (int h = 0; op.appends && h < kv_heads; ++h) rotate(key + h * dim);
      if (op.growth.scale != 0.0f) {
        reference::grow_query(op.growth, position, spec_.heads * dim, query);
      }
      if (op.appends)
        reference::append_kv(kv, table_of(s, op.layer), position, key, &value_[row * kv_heads * dim]);
      if (spec_.latent.index_dim > 0)
        append_index_key({op.inv_freq, op.magnitude, false}, op.layer, table_of(s, op.layer), row, position);
    });
  }

  void attend(const Attend& op) override {
    const int group = spec_.layers[static_cast<size_t>(op.layer)].group;
    const int64_t cols = static_cast<int64_t>(spec_.heads) * spec_.head_dim_of(group);
    reference::Attention layer{pools_.kv_of(op.layer), nullptr,    spec_.heads, op.window, op.scale,
                               values_of(op.sinks),    op.softcap, op.chunk};
    for_each_token([&](const SequenceSlice& s, int64_t row, int32_t position) {
      layer.bidirectional_length = op.bidirectional || s.both_ways ? s.context_len + s.num_tokens : 0;
      layer.both_ways = s.both_ways;
      layer.table = table_of(s, op.layer);
      layer.sparse_pages = s.sparse_pages;
      std::vector<bool> chosen;
      if (spec_.latent.index_top > 0) {
        const LatentShape& index = spec_.latent;
        chosen = reference::indexed_tokens(
            {pools_.index_keys_of(op.layer), layer.table, index.index_heads, index.index_top}, position,
            &index_query_[row * index.index_heads * index.index_dim],
            &index_weight_[row * index.index_heads]);
        layer.chosen = &chosen;
      }
      reference::attend(layer, position, &query_[row * cols], &attention_[row * cols]);
    });
    if (op.gated) reference::gate(attention_gate_.data(), rows_ * cols, attention_.data());
  }

  void norm_mix(const NormMix& op) override {
    norm_rows(op.norm);
    int64_t cols = 0;
    for (const Linear& in : op.in) cols += in.weight == nullptr ? 0 : in.weight->rows;
    for (const NormMix::Behind& b : op.behind) cols += b.by.weight == nullptr ? 0 : b.by.weight->rows;
    Floats projected(rows_ * cols), out;
    int64_t first = 0;
    const auto append = [&](const Linear& in, const float* x) {
      out.resize(rows_ * in.weight->rows);
      watch({&in}, 0, x, rows_);
      reference::linear(linear_of(in), 0, x, rows_, out.data());
      for (int64_t t = 0; t < rows_; ++t)
        std::copy_n(&out[t * in.weight->rows], in.weight->rows, &projected[t * cols + first]);
      first += in.weight->rows;
    };
    for (const Linear& in : op.in) {
      if (in.weight != nullptr) append(in, normed_.data());
    }
    for (const NormMix::Behind& b : op.behind) {
      if (b.by.weight == nullptr) continue;
      Floats part(rows_ * b.by.weight->cols);
      for (int64_t t = 0; t < rows_; ++t)
        std::copy_n(&projected[t * cols + b.first], b.by.weight->cols, &part[t * b.by.weight->cols]);
      append(b.by, part.data());
    }
    const StateShape& s = spec_.state;
    for (int64_t t = 0; t < rows_; ++t) {
      const float* from = &projected[t * cols];
      float* to = &mix_[t * s.mix_cols()];
      const auto place = [&](const HeadColumns& part, int64_t at) {
        reference::place_heads(part, from, to + at);
      };
      place(op.query, s.query_at());
      place(op.key, s.key_at());
      place(op.value, s.value_at());
      place(op.gate, s.gate_at());
      place(op.step, s.step_at());
      place(op.beta, s.beta_at());
      reference::multiply_heads(op.value_by, from, to + s.value_at());
    }
  }

  void mix(const StateMix& op) override {
    const auto [group, index] = spec_.state_place(op.layer);
    const StateBlock at(spec_.state);
    const reference::StateMix layer{spec_.state,
                                    static_cast<reference::StateMix::Kind>(op.kind),
                                    values_of(op.conv),
                                    values_of(op.conv_bias),
                                    values_of(op.conv_keys),
                                    values_of(op.conv_values),
                                    op.conv_silu,
                                    values_of(op.a),
                                    values_of(op.step_bias),
                                    values_of(op.d),
                                    op.step_min,
                                    op.step_max,
                                    values_of(op.norm.weight),
                                    op.norm.eps,
                                    op.norm_size,
                                    op.norm_before_gate,
                                    op.gate_sigmoid,
                                    pools_.of_group(group),
                                    pools_.block_floats(group),
                                    index * at.floats};
    for_each_state_token(group, [&](const int32_t* table, int64_t row, int32_t position) {
      reference::state_mix(layer, table, position, &mix_[row * spec_.state.mix_cols()],
                           &attention_[row * spec_.state.values()]);
    });
  }

  void time_mix(const TimeMix& op) override {
    norm_rows(op.norm);
    const int64_t n = spec_.hidden;
    reference::TimeMix layer = pools_.shifted_layer(op.layer);
    layer.first = op.first;
    layer.k_k = values_of(op.k_k);
    layer.k_a = values_of(op.k_a);
    layer.r_k = values_of(op.r_k);
    layer.norm = values_of(op.head_norm.weight);
    layer.norm_bias = values_of(op.head_norm.bias);
    layer.norm_eps = op.head_norm.eps;
    first_values_.resize(normed_.size());
    const auto product = [&](const Linear& by, const Floats& x) {
      Floats y(static_cast<size_t>(by.weight->rows));
      watch({&by}, 0, x.data(), 1);
      reference::linear(linear_of(by), 0, x.data(), 1, y.data());
      return y;
    };
    using reference::Squash;
    const auto low = [&](const TimeMix::LowRankProduct& by, const Floats& x, Squash between) {
      Floats inner = product(by.down, x);
      reference::squash(between, std::ssize(inner), inner.data());
      return product(by.up, inner);
    };
    for_each_state_token(
        spec_.state_place(op.layer).group, [&](const int32_t* table, int64_t row, int32_t position) {
          Floats shifted(static_cast<size_t>(6 * n));
          reference::token_shift(layer, table, position, 0, &normed_[row * n], values_of(op.shift), 6,
                                 shifted.data());
          const auto input = [&](int64_t i) { return Floats(&shifted[i * n], &shifted[i * n] + n); };
          const Floats r = product(op.r, input(0)), k = product(op.k, input(2)), v = product(op.v, input(3));
          const Floats decay = low(op.decay, input(1), Squash::kTanh);
          const Floats mixed = op.first ? Floats() : low(op.value, input(3), Squash::kNone);
          const Floats rate = low(op.rate, input(4), Squash::kNone);
          const Floats gate = low(op.gate, input(5), Squash::kSigmoid);
          reference::time_mix(layer, table, position,
                              {r.data(), k.data(), v.data(), decay.data(), rate.data(), mixed.data(),
                               gate.data(), &first_values_[row * n], &attention_[row * n]});
        });
  }

  void channel_mix_add(const ChannelMix& op) override {
    norm_rows(op.norm);
    const int64_t n = spec_.hidden;
    const reference::TimeMix layer = pools_.shifted_layer(op.layer);
    Floats shifted(normed_.size()), out(rows_ * n);
    for_each_state_token(spec_.state_place(op.layer).group,
                         [&](const int32_t* table, int64_t row, int32_t position) {
                           reference::token_shift(layer, table, position, 1, &normed_[row * n],
                                                  values_of(op.shift), 1, &shifted[row * n]);
                         });
    normed_ = std::move(shifted);
    feed_forward({}, op.key, op.value, Activation::kReluSquared, out);
    add_block(out, {}, 1.0f);
  }

  void project_add(const Projection& op) override {
    Floats out(rows_ * spec_.hidden), values;
    if (op.head_values.weight != nullptr) values = head_values(op.head_values);
    const Floats& y = op.head_values.weight != nullptr ? values : attention_;
    watch({&op.linear}, 0, y.data(), rows_);
    adapted_linear(op.linear, y.data(), out.data());
    add_block(out, op.norm_after, op.scale);
  }

  void ffn_add(const Ffn& op) override {
    norm_rows(op.norm);
    Floats out(rows_ * spec_.hidden);
    feed_forward(op.gate, op.up, op.down, op.activation, out);
    add_block(out, op.norm_after, op.scale);
  }

  void norm_residual(const Norm& op) override {
    for (int64_t t = 0; t < rows_; ++t) {
      norm(op, &residual_[t * spec_.hidden], spec_.hidden, &residual_[t * spec_.hidden]);
    }
  }

  void route(const Route& op) override {
    norm_rows(op.norm);
    const int64_t experts = spec_.experts, k = op.experts_per_token;
    const auto over = op.weighting == Route::Weighting::kSoftmaxAll ? reference::SoftmaxOver::kAll
                                                                    : reference::SoftmaxOver::kChosen;
    Floats scores(rows_ * experts);
    reference::linear(linear_of(op.router), 0, normed_.data(), rows_, scores.data());
    reference::scale(op.score_scale, rows_ * experts, scores.data());
    const bool renormalize = op.weighting == Route::Weighting::kSigmoidRenormalized;
    const bool sigmoid = renormalize || op.weighting == Route::Weighting::kSigmoid;
    const reference::SigmoidRouting by_sigmoid{values_of(op.choice_bias), op.groups, op.groups_chosen,
                                               renormalize};
    for (int64_t t = 0; t < rows_; ++t) {
      int32_t* chosen = &chosen_[t * k];
      float* weight = &chosen_weight_[t * k];
      if (sigmoid) {
        reference::route_sigmoid(&scores[t * experts], experts, k, by_sigmoid, chosen, weight);
      } else {
        reference::route_top_k(&scores[t * experts], experts, k, over, chosen, weight, op.groups,
                               op.groups_chosen);
      }
      reference::scale(op.scale, k, weight);
      if (op.expert_scales != nullptr)
        reference::scale_chosen(values_of(op.expert_scales), chosen, k, weight);
    }
  }

  void experts_add(const Experts& op) override {
    if (op.norm.present()) return normed_experts_add(op);
    if (op.shared.up.weight != nullptr) shared_expert_add(op.shared, op.activation);
    if (op.up.weight == nullptr) return;
    run_experts(op, residual_);
  }

  // to += what the experts make of normed_; to: [rows][hidden]
  void run_experts(const Experts& op, Floats& to) {
    const int64_t k = spec_.experts_per_token;
    reference::FeedForward experts = feed_forward_of(op.gate, op.up, op.down, op.activation);
    experts.alpha = op.alpha;
    experts.limit = op.limit;
    using Product = reference::ExpertProduct;
    for (int64_t t = 0; t < rows_; ++t) {
      const auto behind = [&](Product product, int32_t expert, const float* x, float* y) {
        if (product == Product::kGate) watch({&op.gate, &op.up}, expert, x, 1);
        if (product == Product::kDown) watch({&op.down}, expert, x, 1);
        const bool up = product == Product::kUp || (product == Product::kGate && op.gate.weight == nullptr);
        low_rank_add(up ? op.up : product == Product::kDown ? op.down : op.gate, adapter_of(t), x, y, expert);
      };
      reference::experts_add(experts, &chosen_[t * k], &chosen_weight_[t * k], k, &normed_[t * spec_.hidden],
                             &to[t * spec_.hidden], op.weigh_input, behind);
    }
  }

  void normed_experts_add(const Experts& op) {
    Floats shared(rows_ * spec_.hidden), experts(rows_ * spec_.hidden);
    norm_rows(op.shared_norm);
    feed_forward(op.shared.gate, op.shared.up, op.shared.down, op.activation, shared);
    norm_rows(op.norm);
    run_experts(op, experts);
    for (int64_t at = 0; at < rows_ * spec_.hidden; at += spec_.hidden) {
      norm(op.shared_norm_after, &shared[at], spec_.hidden, &shared[at]);
      norm(op.experts_norm_after, &experts[at], spec_.hidden, &experts[at]);
      reference::add(1.0f, &experts[at], spec_.hidden, &shared[at]);
    }
    add_block(shared, op.norm_after, 1.0f);
  }

  void norm_logits(const Logits& op) override {
    Floats normed(spec_.hidden);
    for (size_t i = 0; i < batch_.logit_rows.size(); ++i) {
      norm(op.norm, &residual_[static_cast<int64_t>(batch_.logit_rows[i]) * spec_.hidden], spec_.hidden,
           normed.data());
      float* logits = &logits_[i * spec_.vocab];
      reference::linear(linear_of(op.output), 0, normed.data(), 1, logits);
      watch({&op.output}, 0, normed.data(), 1);
      low_rank_add(op.output, adapter_of(batch_.logit_rows[i]), normed.data(), logits);
      reference::scale(op.scale, spec_.vocab, logits);
      reference::softcap(op.softcap, spec_.vocab, logits);
    }
  }

  std::span<const float> logits() override {
    return {logits_.data(), batch_.logit_rows.size() * spec_.vocab};
  }

  void read_hidden(const Norm& op, int32_t row, std::span<float> to) override {
    MILLRACE_CHECK(row >= 0 && row < rows_ && std::ssize(to) == spec_.hidden);
    norm(op, &residual_[static_cast<int64_t>(row) * spec_.hidden], spec_.hidden, to.data());
  }

  void read_block(int group, int32_t block, std::span<std::byte> to) override {
    const std::span<std::byte> from = pools_.block(group, block);
    MILLRACE_CHECK(to.size() == from.size());
    std::copy(from.begin(), from.end(), to.begin());
  }

  void write_block(int group, int32_t block, std::span<const std::byte> from) override {
    const std::span<std::byte> to = pools_.block(group, block);
    MILLRACE_CHECK(to.size() == from.size());
    std::copy(from.begin(), from.end(), to.begin());
  }

  void copy_block(int group, int32_t from, int32_t to) override {
    const std::span<std::byte> source = pools_.block(group, from);
    std::copy(source.begin(), source.end(), pools_.block(group, to).begin());
  }

  void send_rows(bool /*routing*/) override {  // copies: operations go on before anybody reads them
    sent_residual_.assign(residual_.begin(), residual_.begin() + rows_ * spec_.hidden);
    sent_chosen_.assign(chosen_.begin(), chosen_.begin() + rows_ * spec_.experts_per_token);
    sent_weight_.assign(chosen_weight_.begin(), chosen_weight_.begin() + rows_ * spec_.experts_per_token);
  }
  HostRows rows_out() override { return {sent_residual_, sent_chosen_, sent_weight_}; }
  void set_residual(std::span<const float> rows) override {
    std::copy(rows.begin(), rows.end(), residual_.begin());
  }
  void add_residual(std::span<const float> rows) override {
    reference::add(1.0f, rows.data(), std::ssize(rows), residual_.data());
  }
  void take_routed(const Norm& op, const HostRows& rows) override {
    set_residual(rows.residual);
    norm_rows(op);
    std::copy(rows.chosen.begin(), rows.chosen.end(), chosen_.begin());
    std::copy(rows.weights.begin(), rows.weights.end(), chosen_weight_.begin());
    std::fill_n(residual_.begin(), rows_ * spec_.hidden, 0.0f);
  }
  void keep_experts(std::span<const int32_t> local) override {
    for (int64_t i = 0; i < rows_ * spec_.experts_per_token; ++i) {
      chosen_[i] = local[static_cast<size_t>(chosen_[i])];
    }
  }

  std::vector<float> read_slot(Slot slot) override {
    const auto [values, columns] = slot_of(slot);
    const int64_t rows = slot == Slot::kLogits ? static_cast<int64_t>(batch_.logit_rows.size()) : rows_;
    return Floats(values->begin(), values->begin() + rows * columns);
  }

  void write_slot(Slot slot, std::span<const float> in) override {
    Floats& values = *slot_of(slot).first;
    MILLRACE_CHECK(in.size() <= values.size());
    std::copy(in.begin(), in.end(), values.begin());
  }

 private:
  std::pair<Floats*, int64_t> slot_of(Slot slot) {
    switch (slot) {
      case Slot::kResidual:
        return {&residual_, spec_.hidden};
      case Slot::kQuery:
        return {&query_, spec_.heads * spec_.head_dim};
      case Slot::kKey:
        return {&key_, spec_.kv_heads * spec_.head_dim};
      case Slot::kValue:
        return {&value_, spec_.kv_heads * spec_.head_dim};
      case Slot::kAttention:
        return {&attention_, spec_.heads * spec_.head_dim};
      case Slot::kLogits:
        break;
    }
    return {&logits_, spec_.vocab};
  }

  int32_t adapter_of(int64_t row) const {
    for (const SequenceSlice& s : batch_.sequences) {
      if (row >= s.first_row && row < s.first_row + s.num_tokens) return s.adapter;
    }
    return -1;
  }

  // y += B (A x): of one row, what an adapter adds to a product.
  void low_rank_add(const Linear& op, int32_t adapter, const float* x, float* y, int64_t expert = 0) const {
    const LowRank* update = batch_.adapters == nullptr ? nullptr : batch_.adapters->find(adapter, op.weight);
    if (update == nullptr) return;
    Floats inner(update->a->rows), out(update->b->rows);
    reference::linear({&own(*update->a).view, nullptr}, expert, x, 1, inner.data());
    reference::linear({&own(*update->b).view, nullptr}, expert, inner.data(), 1, out.data());
    reference::add(1.0f, out.data(), std::ssize(out), y);
  }

  // Runs of rows that FP8 products compute, or do not: body(first, count, are they).
  template <class Body>
  void for_each_run(const Body& body) const {
    for (int64_t first = 0, end; first < rows_; first = end) {
      for (end = first; end < rows_ && fp8_rows_[end] == fp8_rows_[first];) ++end;
      body(first, end - first, fp8_rows_[first]);
    }
  }
  static bool has_fp8(const Linear& op) { return !own(*op.weight).fp8.codes.empty(); }

  // y = W x + b of all rows. x: [rows][in], y: [rows][out]
  void product(const Linear& op, const float* x, float* y) const {
    for_each_run([&](int64_t first, int64_t count, bool fp8) {
      const float* from = x + first * op.weight->cols;
      float* to = y + first * op.weight->rows;
      if (fp8 && has_fp8(op)) {
        reference::fp8_linear(own(*op.weight).fp8, values_of(op.bias), from, count, to);
      } else {
        reference::linear(linear_of(op), 0, from, count, to);
      }
    });
  }

  void round_fp8_rows(Floats& values, int64_t cols) const {
    for_each_run([&](int64_t first, int64_t count, bool fp8) {
      if (fp8) reference::round_to_bf16(count * cols, &values[first * cols]);
    });
  }

  // y = W x + b of all rows, with what their adapters add. x: [rows][in], y: [rows][out]
  void adapted_linear(const Linear& op, const float* x, float* y) const {
    product(op, x, y);
    if (batch_.adapters == nullptr) return;
    for (int64_t t = 0; t < rows_; ++t) {
      low_rank_add(op, adapter_of(t), x + t * op.weight->cols, y + t * op.weight->rows);
    }
  }

  // out = down(act(gate n) * (up n)); out: [rows][hidden]
  void feed_forward(const Linear& gate, const Linear& up, const Linear& down, Activation activation,
                    Floats& out) const {
    const reference::FeedForward plain = feed_forward_of(gate, up, down, activation);
    if (batch_.adapters == nullptr && watcher_ == nullptr && !has_fp8(up)) {
      return reference::feed_forward(plain, normed_.data(), rows_, out.data());
    }
    watch({&gate, &up}, 0, normed_.data(), rows_);
    const Linear& first = gate.weight == nullptr ? up : gate;
    Floats gated(rows_ * first.weight->rows), raised(gate.weight == nullptr ? 0 : gated.size());
    adapted_linear(first, normed_.data(), gated.data());
    if (gate.weight != nullptr) {
      adapted_linear(up, normed_.data(), raised.data());
      if (has_fp8(gate) && has_fp8(up) && has_fp8(down)) {
        round_fp8_rows(gated, up.weight->rows);
        round_fp8_rows(raised, up.weight->rows);
      }
    }
    for (size_t i = 0; i < gated.size(); ++i) {
      gated[i] = reference::activate(plain, gated[i], raised.empty() ? 1.0f : raised[i]);
    }
    watch({&down}, 0, gated.data(), rows_);
    adapted_linear(down, gated.data(), out.data());
  }

  void watch(std::initializer_list<const Linear*> products, int64_t expert, const float* x,
             int64_t rows) const {
    if (watcher_ == nullptr) return;
    std::vector<const Weight*> weights;
    for (const Linear* product : products) {
      if (product->weight != nullptr) weights.push_back(product->weight);
    }
    watcher_->see(weights, expert, x, rows, weights.front()->cols);
  }

  void norm_rows(const Norm& op) {
    for (int64_t t = 0; t < rows_; ++t) {
      norm(op, &residual_[t * spec_.hidden], spec_.hidden, &normed_[t * spec_.hidden]);
    }
  }

  // Query and gate of each head alternate in the product.
  void gated_query(const Linear& q) {
    Floats both(rows_ * q.weight->rows);
    product(q, normed_.data(), both.data());
    const int64_t dim = spec_.head_dim;
    for (int64_t i = 0; i < rows_ * spec_.heads; ++i) {
      std::copy_n(&both[2 * i * dim], dim, &query_[i * dim]);
      std::copy_n(&both[(2 * i + 1) * dim], dim, &attention_gate_[i * dim]);
    }
  }

  void norm_heads(const Norm& op, int64_t heads, int64_t dim, bool whole, Floats& values) {
    const int64_t cols = whole ? heads * dim : dim;
    const int64_t count = whole ? rows_ : rows_ * heads;
    for (int64_t i = 0; i < count; ++i) norm(op, &values[i * cols], cols, &values[i * cols]);
  }

  // residual += scale * norm_after(block); block: [rows][hidden]
  void add_block(Floats& block, const Norm& norm_after, float scale) {
    for (int64_t t = 0; t < rows_; ++t) {
      float* from = &block[t * spec_.hidden];
      norm(norm_after, from, spec_.hidden, from);
      reference::add(scale, from, spec_.hidden, &residual_[t * spec_.hidden]);
    }
  }

  // The indexer's queries, keys and weights of heads; compressed: what its queries are made of.
  void index_rows(const NormLatentQkv& op, const float* compressed) {
    const int64_t dim = spec_.latent.index_dim, heads = spec_.latent.index_heads;
    index_query_.resize(rows_ * heads * dim);
    index_key_.resize(rows_ * dim);
    index_weight_.resize(rows_ * heads);
    reference::linear(linear_of(op.index_q), 0, compressed, rows_, index_query_.data());
    reference::linear(linear_of(op.index_k), 0, normed_.data(), rows_, index_key_.data());
    reference::linear(linear_of(op.index_weights), 0, normed_.data(), rows_, index_weight_.data());
    for (int64_t t = 0; t < rows_; ++t)
      norm(op.index_k_norm, &index_key_[t * dim], dim, &index_key_[t * dim]);
  }

  void append_index_key(const reference::Rotary& rotary, int layer, const int32_t* table, int64_t row,
                        int32_t position) {
    const int64_t dim = spec_.latent.index_dim, heads = spec_.latent.index_heads;
    for (int64_t h = 0; h < heads; ++h)
      reference::rotate(rotary, position, &index_query_[(row * heads + h) * dim]);
    reference::rotate(rotary, position, &index_key_[row * dim]);
    reference::append_kv(pools_.index_keys_of(layer), table, position, &index_key_[row * dim], nullptr);
  }

  // [rows][heads][value] of what heads attended to.
  Floats head_values(const Linear& op) {
    const LatentShape& s = spec_.latent;
    Floats out(rows_ * spec_.heads * s.value), latent(rows_ * s.rank), made(rows_ * s.value);
    for (int64_t h = 0; h < spec_.heads; ++h) {
      for (int64_t t = 0; t < rows_; ++t) {
        std::copy_n(&attention_[(t * spec_.heads + h) * spec_.head_dim + s.rope], s.rank,
                    &latent[t * s.rank]);
      }
      watch({&op}, h, latent.data(), rows_);
      reference::linear(linear_of(op), h, latent.data(), rows_, made.data());
      for (int64_t t = 0; t < rows_; ++t) {
        std::copy_n(&made[t * s.value], s.value, &out[(t * spec_.heads + h) * s.value]);
      }
    }
    return out;
  }

  void shared_expert_add(const Experts::Shared& op, Activation activation) {
    Floats out(rows_ * spec_.hidden), mix(rows_, 1.0f);  // mix: the factor of each row
    feed_forward(op.gate, op.up, op.down, activation, out);
    if (op.mix.weight != nullptr) {
      reference::linear(linear_of(op.mix), 0, normed_.data(), rows_, mix.data());
      reference::squash(reference::Squash::kSigmoid, rows_, mix.data());
    }
    reference::scale(op.scale, rows_, mix.data());
    for (int64_t t = 0; t < rows_; ++t)
      reference::add(mix[t], &out[t * spec_.hidden], spec_.hidden, &residual_[t * spec_.hidden]);
  }

  // body(sequence, row, position)
  template <class Body>
  void for_each_token(Body body) {
    for (const SequenceSlice& s : batch_.sequences) {
      for (int32_t i = 0; i < s.num_tokens; ++i) body(s, s.first_row + i, s.context_len + i);
    }
  }

  // body(block table, row, position), with blocks for what is not kept of this step.
  template <class Body>
  void for_each_state_token(int group, const Body& body) {
    std::vector<int32_t> table;
    const SequenceSlice* of = nullptr;
    for_each_token([&](const SequenceSlice& s, int64_t row, int32_t position) {
      if (of != &s) {
        const int32_t* known = s.tables[static_cast<size_t>(group)];
        table.assign(known, known + blocks_for(s.context_len + s.num_tokens));
        int32_t spare = spec_.kv_groups[static_cast<size_t>(group)].num_blocks;
        for (size_t b = static_cast<size_t>(s.context_len / kBlockTokens); b < table.size(); ++b) {
          if (table[b] == kNoBlock) table[b] = spare++;
        }
        of = &s;
      }
      body(table.data(), row, position);
    });
  }

  const int32_t* table_of(const SequenceSlice& s, int layer) const {
    return s.tables[spec_.layers[layer].group];
  }

  ExecutorSpec spec_;
  InputWatcher* watcher_ = nullptr;
  Batch batch_;
  int64_t rows_ = 0;
  std::vector<bool> fp8_rows_;
  Floats residual_, normed_, query_, key_, value_, attention_, chosen_weight_, logits_;
  Floats attention_gate_;                          // [rows][heads * head_dim]
  Floats mix_;                                     // [rows][mix columns]: of layers with a state
  Floats first_values_;                            // [rows][hidden]: of RWKV 7's first layer
  Floats index_query_, index_key_, index_weight_;  // of an indexer
  Floats layer_inputs_;                            // [rows][layers * layer_input]
  std::vector<int32_t> chosen_, sent_chosen_;
  Floats sent_residual_, sent_weight_;
  ReferencePools pools_;
};

}  // namespace

size_t reference_workspace_bytes(const ExecutorSpec& spec) {
  const LatentShape& latent = spec.latent;
  const size_t latent_row = spec.heads * (latent.nope + latent.rope + latent.value) + latent.q_rank +
                            3 * latent.rank + (latent.index_heads + 1) * latent.index_dim +
                            latent.index_heads;
  const size_t per_row = latent_row + 2 * spec.hidden + 2 * (spec.heads + spec.kv_heads) * spec.head_dim +
                         2 * spec.experts_per_token + 2 * spec.ffn +
                         2 * spec.layers.size() * spec.layer_input +
                         (spec.gated_attention ? spec.heads * spec.head_dim : 0) +
                         (spec.state.present() ? spec.state.mix_cols() + spec.state.values() : 0);
  return sizeof(float) * (per_row * spec.max_tokens + static_cast<size_t>(spec.max_logit_rows) * spec.vocab);
}

std::unique_ptr<Executor> make_reference_executor(const ExecutorSpec& spec) {
  return std::make_unique<ReferenceExecutor>(spec);
}

}  // namespace millrace
