#include "bench_roofline.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

#include "backend/forwarding_executor.h"
#include "backend/peak.h"
#include "base/error.h"
#include "base/paging.h"
#include "bench_machine.h"
#include "output.h"
#include "prompt.h"

namespace millrace::cli {
namespace {

constexpr const char* kNames[] = {"embed",   "norm_qkv", "rope_append_kv", "attend",      "project_add",
                                  "ffn_add", "route",    "experts_add",    "norm_logits", "pick"};
static_assert(std::size(kNames) == kNumOperations);

using Clock = std::chrono::steady_clock;

class MeteredExecutor final : public ForwardingExecutor {
 public:
  MeteredExecutor(std::unique_ptr<Executor> inner, std::shared_ptr<OpMeter> meter)
      : ForwardingExecutor(std::move(inner)),
        meter_(std::move(meter)),
        timed_(this->inner().time_operations()) {
    if (timed_) meter_->watch(this->inner());
  }

  void begin(const Batch& batch) override {
    tokens_ = static_cast<double>(batch.tokens.size());
    logit_rows_ = static_cast<double>(batch.logit_rows.size());
    only_logits_ = batch.only_logits;
    sequences_.assign(batch.sequences.begin(), batch.sequences.end());
    inner().begin(batch);
  }
  void embed(const Embed& op) override {
    time(Operation::kEmbed, [&] { inner().embed(op); });
    const Weight& table = *op.table;
    meter_->at(Operation::kEmbed).bytes += stored(table).bytes / static_cast<double>(table.rows) * tokens_;
  }
  void layer_inputs(const LayerInputs& op) override {  // counted with the embedding
    time(Operation::kEmbed, [&] { inner().layer_inputs(op); });
    const Weight& table = *op.table;
    meter_->at(Operation::kEmbed).bytes += stored(table).bytes / static_cast<double>(table.rows) * tokens_;
    add(Operation::kEmbed, op.projection, tokens_);
  }
  void end_layer(const EndLayer& op) override {  // counted with the feed-forward layer
    time(Operation::kFfn, [&] { inner().end_layer(op); });
    for (const Linear* linear : {&op.gate, &op.projection}) {
      if (linear->weight != nullptr) add(Operation::kFfn, *linear, tokens_);
    }
  }
  void norm_qkv(const NormQkv& op) override {
    time(Operation::kNormQkv, [&] { inner().norm_qkv(op); });
    add(Operation::kNormQkv, op.q, tokens_);
    if (op.k.weight == nullptr) return;  // another layer's
    add(Operation::kNormQkv, op.k, tokens_);
    if (op.v.weight != op.k.weight) add(Operation::kNormQkv, op.v, tokens_);
  }
  void norm_latent_qkv(const NormLatentQkv& op) override {
    time(Operation::kNormQkv, [&] { inner().norm_latent_qkv(op); });
    for (const Linear* linear : {&op.q_a, &op.q, &op.kv_a, &op.k_b}) {
      if (linear->weight != nullptr) add(Operation::kNormQkv, *linear, tokens_);
    }
  }
  void rope_append_kv(const Rope& op) override {
    time(Operation::kRopeAppend, [&] { inner().rope_append_kv(op); });
    if (op.appends) meter_->at(Operation::kRopeAppend).bytes += tokens_ * kv_bytes_per_token(op.layer);
  }
  void attend(const Attend& op) override {
    time(Operation::kAttend, [&] { inner().attend(op); });
    const ExecutorSpec& spec = meter_->runtime().spec();
    // From here on, in the last layer, rows without logits are left out.
    if (only_logits_ && op.layer + 1 == std::ssize(spec.layers) && spec.beside.empty()) tokens_ = logit_rows_;
    OpTotals& totals = meter_->at(Operation::kAttend);
    for (const SequenceSlice& s : sequences_) {
      double pairs = 0.0, first = s.context_len;  // first: the earliest position any row sees
      for (int32_t i = 0; i < s.num_tokens; ++i) {
        const int32_t position = s.context_len + i;
        const int32_t seen = op.window > 0 ? std::min(op.window, position + 1) : position + 1;
        pairs += seen;
        first = std::min<double>(first, position + 1 - seen);
      }
      double& operations = spec.kv_type == DType::kQ8_0 ? totals.int8_ops : totals.float_ops;
      const int group = spec.layers[static_cast<size_t>(op.layer)].group;
      operations += 4.0 * pairs * spec.heads * spec.head_dim_of(group);
      totals.bytes += (s.context_len + s.num_tokens - first) * kv_bytes_per_token(op.layer);
    }
  }
  // A layer with a state is counted as one with attention: its rows as norm_qkv, its state as attend.
  void norm_mix(const NormMix& op) override {
    time(Operation::kNormQkv, [&] { inner().norm_mix(op); });
    for (const Linear& linear : op.in) {
      if (linear.weight != nullptr) add(Operation::kNormQkv, linear, tokens_);
    }
    for (const NormMix::Behind& behind : op.behind) {
      if (behind.by.weight != nullptr) add(Operation::kNormQkv, behind.by, tokens_);
    }
  }
  void mix(const StateMix& op) override {
    time(Operation::kAttend, [&] { inner().mix(op); });
    add_state(meter_->runtime().spec().state, /*read_twice=*/op.kind == StateMix::Kind::kGatedDelta);
  }
  void time_mix(const TimeMix& op) override {  // its products are in it
    time(Operation::kAttend, [&] { inner().time_mix(op); });
    for (const Linear* linear : {&op.r, &op.k, &op.v}) add(Operation::kAttend, *linear, tokens_);
    for (const TimeMix::LowRankProduct* low : {&op.decay, &op.rate, &op.value, &op.gate}) {
      if (low->down.weight == nullptr) continue;
      add(Operation::kAttend, low->down, tokens_);
      add(Operation::kAttend, low->up, tokens_);
    }
    add_state(meter_->runtime().spec().state, /*read_twice=*/true);
  }
  void channel_mix_add(const ChannelMix& op) override {
    time(Operation::kFfn, [&] { inner().channel_mix_add(op); });
    add(Operation::kFfn, op.key, tokens_);
    add(Operation::kFfn, op.value, tokens_);
  }
  void project_add(const Projection& op) override {
    time(Operation::kProject, [&] { inner().project_add(op); });
    add(Operation::kProject, op.linear, tokens_);
    if (op.head_values.weight != nullptr) add(Operation::kProject, op.head_values, tokens_);
  }
  void ffn_add(const Ffn& op) override {
    time(Operation::kFfn, [&] { inner().ffn_add(op); });
    for (const Linear* linear : {&op.gate, &op.up, &op.down}) {
      if (linear->weight != nullptr) add(Operation::kFfn, *linear, tokens_);
    }
  }
  void route(const Route& op) override {
    chosen_ = op.experts_per_token;
    time(Operation::kRoute, [&] { inner().route(op); });
    add(Operation::kRoute, op.router, tokens_);
  }
  void experts_add(const Experts& op) override {
    time(Operation::kExperts, [&] { inner().experts_add(op); });
    for (const Linear* linear : {&op.gate, &op.up, &op.down}) add_experts(*linear);
    for (const Linear* linear : {&op.shared.gate, &op.shared.up, &op.shared.down, &op.shared.mix}) {
      if (linear->weight != nullptr) add(Operation::kExperts, *linear, tokens_);
    }
  }
  void norm_logits(const Logits& op) override {
    time(Operation::kLogits, [&] { inner().norm_logits(op); });
    if (logit_rows_ > 0) add(Operation::kLogits, op.output, logit_rows_);
  }

 private:
  struct Stored {
    double bytes;
    double OpTotals::*operations;
  };
  Stored stored(const Weight& weight) const {
    const StoredWeight& s = meter_->runtime().model().stored_weight(weight);
    const bool float4 = s.type == DType::kMXFP4 || s.type == DType::kMXFP4Split;
    return {static_cast<double>(s.bytes), float4                            ? &OpTotals::tile_ops
                                          : info(s.type).block_elements > 1 ? &OpTotals::int8_ops
                                                                            : &OpTotals::float_ops};
  }

  template <class Call>
  void time(Operation op, const Call& call) {
    const Clock::time_point start = Clock::now();
    call();
    OpTotals& totals = meter_->at(op);
    if (!timed_) totals.seconds += std::chrono::duration<double>(Clock::now() - start).count();
    ++totals.calls;
  }

  void add(Operation op, const Linear& linear, double rows) {
    const Stored s = stored(*linear.weight);
    OpTotals& totals = meter_->at(op);
    totals.bytes += s.bytes;
    totals.*s.operations +=
        2.0 * static_cast<double>(linear.weight->experts * linear.weight->rows * linear.weight->cols) * rows;
  }

  // A token reads its head's state at one place or two and writes at one; a state is read once a sequence and
  // step, and written where a block ends.
  void add_state(const StateShape& shape, bool read_twice) {
    const double of_states = static_cast<double>(shape.values()) * shape.key_dim;
    OpTotals& totals = meter_->at(Operation::kAttend);
    totals.float_ops += 2.0 * tokens_ * (read_twice ? 3.0 : 2.0) * of_states;
    for (const SequenceSlice& s : sequences_) {
      const bool written = s.context_len / kBlockTokens < (s.context_len + s.num_tokens) / kBlockTokens;
      totals.bytes += of_states * sizeof(float) * ((s.context_len > 0 ? 1.0 : 0.0) + (written ? 1.0 : 0.0));
    }
  }

  void add_experts(const Linear& linear) {
    const Weight& w = *linear.weight;
    const Stored s = stored(w);
    const auto experts = static_cast<double>(w.experts);
    // Of tokens that choose freely, so many different experts; one token's are all different.
    const double touched =
        tokens_ == 1.0 ? chosen_ : experts * (1.0 - std::pow(1.0 - chosen_ / experts, tokens_));
    OpTotals& totals = meter_->at(Operation::kExperts);
    totals.bytes += s.bytes / experts * touched;
    totals.*s.operations += 2.0 * static_cast<double>(w.rows * w.cols) * tokens_ * chosen_;
  }

  double kv_bytes_per_token(int layer) const {
    const ExecutorSpec& spec = meter_->runtime().spec();
    const int group = spec.layers[static_cast<size_t>(layer)].group;
    return static_cast<double>(spec.kv_parts() * spec.kv_heads_of(group)) *
           static_cast<double>(kv_head_bytes(spec.kv_type, spec.head_dim_of(group)));
  }

  std::shared_ptr<OpMeter> meter_;
  const bool timed_;  // by the device
  double tokens_ = 0.0, logit_rows_ = 0.0, chosen_ = 0.0;
  bool only_logits_ = false;
  std::vector<SequenceSlice> sequences_;
};

struct Machine {
  double read_gb_s = 0.0;
  Peak peak;
  std::optional<double> products;  // of a device: whatever the weights' type is
};

struct Phase {
  const char* name;
  int32_t tokens = 0;
  double seconds = 0.0;
  std::vector<OpTotals> totals;
};

// Per operation: its share of both limits. The larger of the two is how near it is to the machine's best.
struct Shares {
  double bandwidth = 0.0, arithmetic = 0.0;
  double nearest() const { return std::max(bandwidth, arithmetic); }
};

double operations_of(const OpTotals& t) { return t.int8_ops + t.tile_ops + t.float_ops; }

Shares shares_of(const OpTotals& t, const Machine& machine) {
  Shares shares;
  if (t.seconds <= 0.0) return shares;
  shares.bandwidth = t.bytes / t.seconds / (machine.read_gb_s * 1e9);
  // Time the arithmetic would take at its peak; without a measured integer peak, integers are left out.
  double seconds = machine.products ? operations_of(t) / *machine.products : 0.0;
  const std::optional<double>& tile = machine.peak.bf16_tile ? machine.peak.bf16_tile : machine.peak.int8_dot;
  if (machine.peak.int8_dot) seconds += t.int8_ops / *machine.peak.int8_dot;
  if (tile) seconds += t.tile_ops / *tile;
  if (machine.peak.float_fma) seconds += t.float_ops / *machine.peak.float_fma;
  shares.arithmetic = seconds / t.seconds;
  return shares;
}

std::string to_text(const Phase& phase, const Machine& machine) {
  std::string out = fmt::format("{} of {} tokens: {:.1f} ms, {:.2f} tok/s\n", phase.name, phase.tokens,
                                1e3 * phase.seconds, phase.tokens / phase.seconds);
  out +=
      fmt::format("  {:<15} {:>6} {:>10} {:>6} {:>10} {:>9} {:>10} {:>8} {:>8} {:>9}\n", "operation", "calls",
                  "ms", "time", "bytes", "of read", "operations", "of peak", "nearest", "lost ms");
  double accounted = 0.0, lost_in_all = 0.0;
  for (size_t i = 0; i < phase.totals.size(); ++i) {
    const OpTotals& t = phase.totals[i];
    accounted += t.seconds;
    if (t.calls == 0) continue;
    const Shares s = shares_of(t, machine);
    const double lost = t.seconds * (1.0 - s.nearest());
    lost_in_all += lost;
    out += fmt::format(
        "  {:<15} {:>6} {:>10.2f} {:>5.1f}% {:>10} {:>8.1f}% {:>8.2f} G {:>7.1f}% {:>7.1f}% {:>9.2f}\n",
        kNames[i], t.calls, 1e3 * t.seconds, 100.0 * t.seconds / phase.seconds,
        human_bytes(static_cast<size_t>(t.bytes)), 100.0 * s.bandwidth, 1e-9 * operations_of(t),
        100.0 * s.arithmetic, 100.0 * s.nearest(), 1e3 * lost);
  }
  const double rest = phase.seconds - accounted;
  out += fmt::format("  {:<15} {:>6} {:>10.2f} {:>5.1f}% {:>57.2f}\n", "the rest", "", 1e3 * rest,
                     100.0 * rest / phase.seconds, 1e3 * rest);
  lost_in_all += rest;
  out += fmt::format("  limits {:.2f} ms, lost {:.2f} ms: {:.1f}% of what the machine could do\n",
                     1e3 * (phase.seconds - lost_in_all), 1e3 * lost_in_all,
                     100.0 * (1.0 - lost_in_all / phase.seconds));
  return out;
}

nlohmann::ordered_json to_json(const Phase& phase, const Machine& machine) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (size_t i = 0; i < phase.totals.size(); ++i) {
    const OpTotals& t = phase.totals[i];
    if (t.calls == 0) continue;
    const Shares s = shares_of(t, machine);
    rows.push_back({{"operation", kNames[i]},
                    {"calls", t.calls},
                    {"seconds", t.seconds},
                    {"bytes", t.bytes},
                    {"int8_operations", t.int8_ops},
                    {"float4_operations", t.tile_ops},
                    {"float_operations", t.float_ops},
                    {"bandwidth_fraction", s.bandwidth},
                    {"peak_fraction", s.arithmetic},
                    {"lost_seconds", t.seconds * (1.0 - s.nearest())}});
  }
  return {{"tokens", phase.tokens},
          {"seconds", phase.seconds},
          {"tok_s", phase.tokens / phase.seconds},
          {"operations", std::move(rows)}};
}

// The phase's run, and of `repeat` of them the fastest: what disturbs one only slows it down.
template <class Run>
Phase best_phase(const char* name, int32_t tokens, OpMeter& meter, int32_t repeat, const Run& run) {
  Phase best{.name = name, .tokens = tokens, .totals = {}};
  for (int32_t i = 0; i < repeat; ++i) {
    const double seconds = run();
    if (i > 0 && seconds >= best.seconds) continue;
    best.seconds = seconds;
    best.totals.clear();
    for (size_t op = 0; op < kNumOperations; ++op) {
      best.totals.push_back(meter.totals(static_cast<Operation>(op)));
    }
  }
  return best;
}

}  // namespace

std::vector<int32_t> some_tokens(int32_t count, int32_t vocab) {
  std::vector<int32_t> tokens;
  uint32_t state = 12345;
  for (int32_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    tokens.push_back(
        static_cast<int32_t>((static_cast<uint64_t>(state) * static_cast<uint64_t>(vocab)) >> 32));
  }
  return tokens;
}

// Of a deep one the first tokens are computed and the rest repeats them.
kv::Sequence sequence_at(Runtime& runtime, int32_t depth, const std::function<void(int32_t done)>& progress) {
  constexpr int32_t kComputed = 512;
  kv::Sequence sequence = runtime.make_sequence();
  const int32_t repeated = std::max(0, depth - kComputed) / kBlockTokens * kBlockTokens;
  const std::vector<int32_t> tokens = some_tokens(depth - repeated, runtime.config().vocab);
  const int32_t first = std::min(depth, kComputed);
  const auto compute = [&](int32_t from, int32_t until) {
    if (from < until) runtime.prefill(sequence, std::span(tokens).subspan(from, until - from));
  };
  compute(0, first);
  progress(first);
  if (repeated > 0) runtime.repeat_last_block(sequence, repeated);
  compute(first, depth - repeated);
  return sequence;
}

void OpMeter::attach(RuntimeSetup& setup) {
  setup.wrap_executor = [meter = shared_from_this()](std::unique_ptr<Executor> inner) {
    return std::make_unique<MeteredExecutor>(std::move(inner), meter);
  };
}

void OpMeter::watch(const Runtime& runtime) { runtime_ = &runtime; }

void OpMeter::collect() {
  if (executor_ == nullptr) return;
  for (const TimedOperation& timed : executor_->operation_times()) {
    OpTotals& totals = at(timed.operation);
    totals.seconds += timed.seconds;
    if (timed.operation == Operation::kPick) ++totals.calls;  // nobody asks for it by name
  }
}

int roofline(Runtime& runtime, OpMeter& meter, const RooflineRun& run, bool json) {
  meter.watch(runtime);
  const int32_t vocab = runtime.config().vocab;
  const std::vector<int32_t> prompt = some_tokens(run.prompt, vocab);
  const auto start_at_depth = [&] {
    kv::Sequence sequence = sequence_at(runtime, run.depth, [](int32_t) {});
    meter.collect();
    meter.reset();
    return sequence;
  };
  const auto since = [](Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  Phase phases[] = {best_phase("prefill", run.prompt, meter, run.repeat,
                               [&] {
                                 kv::Sequence sequence = start_at_depth();
                                 const Clock::time_point start = Clock::now();
                                 runtime.prefill(sequence, prompt);
                                 meter.collect();
                                 return since(start);
                               }),
                    best_phase("decode", run.generate, meter, run.repeat, [&] {
                      kv::Sequence sequence = start_at_depth();
                      std::vector<int32_t> answer(static_cast<size_t>(run.generate));
                      const Clock::time_point start = Clock::now();
                      runtime.generate_greedy(sequence, prompt[0], answer);
                      meter.collect();
                      return since(start);
                    })};
  const std::optional<double> own = runtime.backend().measure_read_bandwidth();
  const Machine machine = {own ? 1e-9 * *own : measure_read_gb_s(runtime.backend()),
                           own ? Peak{} : measure_peak(runtime.backend()),
                           runtime.backend().measure_products()};
  const auto rate = [](const std::optional<double>& ops) {
    return ops ? nlohmann::ordered_json(*ops * 1e-9) : nlohmann::ordered_json(nullptr);
  };
  if (json) {
    write_json({{"model", valid_utf8(runtime.checkpoint().path())},
                {"device", runtime.backend().name()},
                {"isa", runtime.backend().isa()},
                {"threads", runtime.backend().threads()},
                {"depth", run.depth},
                {"read_gb_s", machine.read_gb_s},
                {"int8_gop_s", rate(machine.peak.int8_dot)},
                {"bf16_tile_gop_s", rate(machine.peak.bf16_tile)},
                {"fma_gop_s", rate(machine.peak.float_fma)},
                {"product_gop_s", rate(machine.products)},
                {"prefill", to_json(phases[0], machine)},
                {"decode", to_json(phases[1], machine)}});
    return 0;
  }
  std::string out = fmt::format("{}\n{} on {}\n", runtime.checkpoint().path(), runtime.config().architecture,
                                runtime.backend().description());
  out += fmt::format("machine: {:.1f} GB/s read", machine.read_gb_s);
  if (machine.peak.int8_dot) {
    out +=
        fmt::format(", {:.1f} Gop/s int8 ({})", *machine.peak.int8_dot * 1e-9, machine.peak.int8_instruction);
  }
  if (machine.peak.bf16_tile) {
    out += fmt::format(", {:.1f} Gop/s bf16 (tdpbf16ps)", *machine.peak.bf16_tile * 1e-9);
  }
  if (machine.peak.float_fma) out += fmt::format(", {:.1f} Gop/s float fma", *machine.peak.float_fma * 1e-9);
  if (machine.products) out += fmt::format(", {:.0f} Gop/s of products", *machine.products * 1e-9);
  out += "\n";
  for (const Phase& phase : phases) out += to_text(phase, machine);
  write_stdout(out);
  return 0;
}

}  // namespace millrace::cli
