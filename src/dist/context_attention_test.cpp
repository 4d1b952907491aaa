// Attention over a context spread over ranks (threads): bits of one device for any number of ranks and any
// schedule, forward, backward and decode; measured bytes against the plan and the formula.
#include "dist/context_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/float_bits.h"
#include "base/normal_floats.h"
#include "dist/delayed_communicator.h"
#include "dist/local_communicator.h"

namespace millrace::dist {
namespace {

struct CloseDevice {
  void operator()(mr_device* device) const { mr_device_close(device); }
};
std::unique_ptr<mr_device, CloseDevice> open_cpu() {
  const mr_device_options options{1, nullptr};
  mr_device* device = nullptr;
  PartialMath::check(mr_device_open("cpu", &options, &device));
  return std::unique_ptr<mr_device, CloseDevice>(device);
}

using Bytes = std::vector<std::byte>;

// Rows of random elements of a type.
Bytes random_rows(mr_dtype type, int64_t rows, int64_t row, unsigned seed) {
  std::mt19937 random(seed);
  NormalFloats normal;
  const auto count = static_cast<size_t>(rows * row);
  Bytes bytes(count * (type == MR_F32 ? 4 : 2));
  for (size_t i = 0; i < count; ++i) {
    const float x = normal(random);
    const uint16_t word = type == MR_F16 ? to_half(x).bits : to_bfloat16(x).bits;
    if (type == MR_F32) {
      std::memcpy(bytes.data() + 4 * i, &x, 4);
    } else {
      std::memcpy(bytes.data() + 2 * i, &word, 2);
    }
  }
  return bytes;
}

// All sequences one after the other, and what one device makes of them.
struct WholeCase {
  WholeCase(const ContextProblem& of, std::vector<int64_t> tokens, unsigned seed = 1)
      : problem(of), lengths(std::move(tokens)), starts(lengths.size() + 1) {
    for (size_t s = 0; s < lengths.size(); ++s) starts[s + 1] = starts[s] + static_cast<int32_t>(lengths[s]);
    rows = starts.back();
    const ContextShape shape = problem.shape();
    q_row = shape.heads * shape.head_dim;
    k_row = shape.kv_heads * shape.head_dim;
    v_row = shape.kv_heads * shape.value_dim;
    o_row = shape.heads * shape.value_dim;
    q = random_rows(problem.type, rows, q_row, seed);
    k = random_rows(problem.type, rows, k_row, seed + 1);
    v = random_rows(problem.type, rows, v_row, seed + 2);
    d_out = random_rows(problem.type, rows, o_row, seed + 3);
    out = d_out, d_q = q, d_k = k, d_v = v;
    lse.resize(static_cast<size_t>(rows * shape.heads));
    d_sinks.resize(static_cast<size_t>(shape.heads));
    run();
  }
  int64_t size() const { return problem.shape().element_bytes; }
  mr_flash_tensor tensor(Bytes& bytes, int64_t row, int dim) const { return {bytes.data(), 0, row, dim}; }
  void run() {
    const auto device = open_cpu();
    mr_flash_problem p{};
    p.type = problem.type;
    p.batch = static_cast<int32_t>(lengths.size());
    p.heads = problem.heads;
    p.kv_heads = problem.kv_heads;
    p.head_dim = problem.head_dim;
    p.value_dim = problem.value_dim;
    p.max_q = p.max_k = static_cast<int32_t>(*std::max_element(lengths.begin(), lengths.end()));
    p.cu_q = p.cu_k = starts.data();
    p.scale = problem.scale;
    p.softcap = problem.softcap;
    p.window_left = static_cast<int32_t>(problem.mask.left);
    p.window_right = static_cast<int32_t>(problem.mask.right);
    p.sinks = problem.sinks;
    size_t bytes = 0;
    PartialMath::check(mr_flash_backward_workspace_bytes(device.get(), &p, 1, &bytes));
    std::unique_ptr<void, decltype(&std::free)> workspace(std::aligned_alloc(256, (bytes + 255) / 256 * 256),
                                                          &std::free);
    const mr_flash_tensor tq = tensor(q, q_row, p.head_dim), tk = tensor(k, k_row, p.head_dim),
                          tv = tensor(v, v_row, p.value_dim), to = tensor(out, o_row, p.value_dim);
    PartialMath::check(
        mr_flash_forward(device.get(), &p, tq, tk, tv, to, lse.data(), workspace.get(), bytes, nullptr));
    const mr_flash_gradients gradients{tensor(d_out, o_row, p.value_dim),
                                       tensor(d_q, q_row, p.head_dim),
                                       tensor(d_k, k_row, p.head_dim),
                                       tensor(d_v, v_row, p.value_dim),
                                       problem.sinks == nullptr ? nullptr : d_sinks.data(),
                                       1};
    PartialMath::check(mr_flash_backward(device.get(), &p, tq, tk, tv, to, lse.data(), &gradients,
                                         workspace.get(), bytes, nullptr));
  }
  // The rows of some runs.
  Bytes of(const Bytes& all, int64_t row, const std::vector<TokenRun>& runs) const {
    Bytes part;
    for (const TokenRun& run : runs) {
      const auto first = all.begin() + (starts[static_cast<size_t>(run.sequence)] + run.first) * row * size();
      part.insert(part.end(), first, first + run.rows() * row * size());
    }
    return part;
  }
  std::vector<float> lse_of(const std::vector<TokenRun>& runs) const {
    std::vector<float> part;
    for (const TokenRun& run : runs) {
      for (int h = 0; h < problem.heads; ++h) {
        const auto first = lse.begin() + h * rows + starts[static_cast<size_t>(run.sequence)] + run.first;
        part.insert(part.end(), first, first + run.rows());
      }
    }
    return part;
  }

  ContextProblem problem;
  std::vector<int64_t> lengths;
  std::vector<int32_t> starts;
  int64_t rows, q_row, k_row, v_row, o_row;
  Bytes q, k, v, d_out, out, d_q, d_k, d_v;
  std::vector<float> lse, d_sinks;
};

// Runs f(rank, communicator) on a thread each; what is thrown first comes out.
template <class F>
void on_ranks(std::vector<std::unique_ptr<Communicator>> group, const F& f) {
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> faults(group.size());
  for (size_t rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        f(static_cast<int>(rank), *group[rank]);
      } catch (...) {
        faults[rank] = std::current_exception();
        group[rank].reset();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& fault : faults) {
    if (fault != nullptr) std::rethrow_exception(fault);
  }
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

struct Spread {
  const ContextLayout& layout;
  const ContextSchedule& schedule;
  bool backward = true;
  PartialOrder order = PartialOrder::kExact;
  LinkDelay delay = {};
};

// Every rank's results have the bits of one device.
void expect_one_device(const WholeCase& c, const Spread& s) {
  auto group = make_local_group(s.layout.ranks);
  if (s.delay.latency_s > 0) {
    for (auto& one : group) one = make_delayed(std::move(one), s.delay);
  }
  on_ranks(std::move(group), [&](int rank, Communicator& link) {
    const auto device = open_cpu();
    const std::vector<TokenRun> runs = s.layout.runs(rank);
    const Bytes q = c.of(c.q, c.q_row, runs), k = c.of(c.k, c.k_row, runs), v = c.of(c.v, c.v_row, runs),
                d_out = c.of(c.d_out, c.o_row, runs);
    Bytes out(d_out.size()), d_q(q.size()), d_k(k.size()), d_v(v.size());
    std::vector<float> lse(static_cast<size_t>(s.layout.rows(rank) * c.problem.heads));
    std::vector<float> d_sinks(static_cast<size_t>(c.problem.heads));
    ContextAttention attention(device.get(), link, c.problem, s.layout, s.schedule, s.order);
    const ContextInputs in{q.data(), k.data(), v.data()};
    attention.forward(in, out.data(), lse.data());
    EXPECT_TRUE(out == c.of(c.out, c.o_row, runs)) << s.schedule.name << ", rank " << rank << ": out";
    EXPECT_TRUE(same(lse, c.lse_of(runs))) << s.schedule.name << ", rank " << rank << ": lse";
    if (!s.backward) return;
    attention.backward(in, {out.data(), lse.data(), d_out.data(), d_q.data(), d_k.data(), d_v.data(),
                            c.problem.sinks == nullptr ? nullptr : d_sinks.data()});
    EXPECT_TRUE(d_q == c.of(c.d_q, c.q_row, runs)) << s.schedule.name << ", rank " << rank << ": d_q";
    EXPECT_TRUE(d_k == c.of(c.d_k, c.k_row, runs)) << s.schedule.name << ", rank " << rank << ": d_k";
    EXPECT_TRUE(d_v == c.of(c.d_v, c.v_row, runs)) << s.schedule.name << ", rank " << rank << ": d_v";
    if (c.problem.sinks != nullptr) {
      EXPECT_EQ(d_sinks, c.d_sinks) << s.schedule.name << ", rank " << rank;
    }
  });
}

ContextProblem small_problem() {
  ContextProblem p;
  p.heads = 4;
  p.kv_heads = 2;
  p.head_dim = 16;
  p.value_dim = 24;
  return p;
}

std::vector<ContextSchedule> schedules_of(const ContextLayout& layout) {
  std::vector<ContextSchedule> all{ring_schedule(layout)};
  for (int a = 2; a <= layout.ranks; ++a) {
    if (layout.ranks % a == 0) all.push_back(mesh_schedule(layout, a));
    if (layout.ranks % (a * a) == 0) all.push_back(wallfacer_schedule(layout, a));
  }
  return all;
}

TEST(ContextAttention, HasTheBitsOfOneDeviceForAnyRanksAndSchedule) {
  const float sinks[] = {0.3f, -1.0f, 2.0f, -std::numeric_limits<float>::infinity()};
  ContextProblem plain = small_problem(), sinking = small_problem();
  sinking.type = MR_F32;
  sinking.sinks = sinks;
  sinking.softcap = 5;
  const WholeCase cases[] = {{plain, {2090, 3, 0, 700}}, {sinking, {1, 1100, 513}}};
  for (const WholeCase& c : cases) {
    for (const int ranks : {1, 2, 3, 4, 8}) {
      const ContextLayout layout = zigzag_layout(c.lengths, ranks);
      for (const ContextSchedule& schedule : schedules_of(layout)) expect_one_device(c, {layout, schedule});
      ASSERT_FALSE(HasFailure()) << ranks << " ranks";
    }
  }
}

TEST(ContextAttention, WindowsMoveOnlyWhatIsSeenInOneHop) {
  ContextProblem p = small_problem();
  p.type = MR_F16;
  p.mask = {300, 0};
  const WholeCase causal(p, {2100, 400});
  p.mask = {100, 290};
  const WholeCase both_sides(p, {1700});
  p.mask = {-1, -1};
  const WholeCase open(p, {1300});
  for (const int ranks : {2, 3, 4}) {
    for (const WholeCase* c : {&causal, &both_sides, &open}) {
      const ContextLayout layout = zigzag_layout(c->lengths, ranks);
      const ContextSchedule window = window_schedule(layout, c->problem.mask), ring = ring_schedule(layout);
      expect_one_device(*c, {layout, window});
      expect_one_device(*c, {layout, ring});
      const auto few =
          forward_bytes(window, layout, c->problem.mask, c->problem.shape(), PartialOrder::kExact);
      const auto all = forward_bytes(ring, layout, c->problem.mask, c->problem.shape(), PartialOrder::kExact);
      for (size_t rank = 0; rank < few.size(); ++rank) EXPECT_LE(few[rank].received, all[rank].received);
    }
  }
  const ContextLayout layout = zigzag_layout({64 * kContextChunk}, 4);
  const auto bytes =
      forward_bytes(window_schedule(layout, {128, 0}), layout, {128, 0}, p.shape(), PartialOrder::kExact);
  const int64_t row = p.shape().kv_heads * (p.shape().head_dim + p.shape().value_dim) * 2;
  for (const RankBytes& of : bytes)
    EXPECT_LE(of.received, 2 * kContextChunk * row);  // a chunk before each piece
}

// Pairs go to random ranks, blocks come by random ways in a random order.
ContextSchedule random_schedule(const ContextLayout& layout, std::mt19937& random) {
  const int n = layout.ranks;
  const auto below = [&](int count) { return static_cast<int>(random() % static_cast<unsigned>(count)); };
  constexpr int kSteps = 4;
  ContextSchedule schedule{"random", n, {}};
  for (int s = 0; s < kSteps; ++s) {
    schedule.steps.push_back({{}, std::vector<std::vector<ContextTile>>(static_cast<size_t>(n))});
  }
  std::map<std::tuple<BlockKind, int, int>, int> there;  // kind, owner, rank -> from which step on
  for (int rank = 0; rank < n; ++rank) {
    there[{BlockKind::kQueries, rank, rank}] = there[{BlockKind::kKeys, rank, rank}] = 0;
  }
  const auto bring = [&](BlockKind kind, int owner, int to) {
    if (const auto found = there.find({kind, owner, to}); found != there.end()) return found->second;
    std::vector<std::pair<int, int>> from;  // rank, step
    for (int rank = 0; rank < n; ++rank) {
      const auto found = there.find({kind, owner, rank});
      if (found != there.end() && found->second < kSteps - 1) from.emplace_back(rank, found->second);
    }
    const std::pair<int, int> by = from[random() % from.size()];
    const int step = by.second + below(kSteps - 1 - by.second);
    schedule.steps[static_cast<size_t>(step)].moves.push_back(
        {kind, owner, by.first, to, layout.runs(owner)});
    return there[{kind, owner, to}] = step + 1;
  };
  std::vector<ContextTile> pairs;
  for (int q = 0; q < n; ++q) {
    for (int k = 0; k < n; ++k) pairs.push_back({q, k});
  }
  std::shuffle(pairs.begin(), pairs.end(), random);
  for (const ContextTile& pair : pairs) {
    const int rank = below(n);
    const int first =
        std::max(bring(BlockKind::kQueries, pair.queries, rank), bring(BlockKind::kKeys, pair.keys, rank));
    const int step = first + below(kSteps - first);
    schedule.steps[static_cast<size_t>(step)].tiles[static_cast<size_t>(rank)].push_back(pair);
  }
  return schedule;
}

TEST(ContextAttention, RandomSchedulesHaveTheSameBits) {
  ContextProblem p = small_problem();
  p.heads = 3;
  p.kv_heads = 1;
  p.head_dim = p.value_dim = 8;
  const WholeCase c(p, {1300, 260});
  std::mt19937 random(7);
  for (int i = 0; i < 24; ++i) {
    const int ranks = 2 + i % 4;
    ContextLayout layout = zigzag_layout(c.lengths, ranks);
    if (i % 2 == 1) {  // any owner at all
      for (auto& owners : layout.owner) {
        for (int& owner : owners) owner = static_cast<int>(random() % static_cast<unsigned>(ranks));
      }
    }
    expect_one_device(c, {layout, random_schedule(layout, random)});
    ASSERT_FALSE(HasFailure()) << "schedule " << i;
  }
}

TEST(ContextAttention, ADelayedLinkChangesNoBit) {
  ContextProblem p = small_problem();
  p.head_dim = p.value_dim = 8;
  const WholeCase c(p, {1500});
  const ContextLayout layout = zigzag_layout(c.lengths, 4);
  for (const ContextSchedule& schedule : schedules_of(layout)) {
    expect_one_device(c, {layout, schedule, true, PartialOrder::kExact, {2e-3, 125e6}});
  }
}

// What a rank's communicator counted over forward.
std::vector<RankBytes> measured_bytes(const WholeCase& c, const ContextLayout& layout,
                                      const ContextSchedule& schedule, PartialOrder order) {
  std::vector<RankBytes> bytes(static_cast<size_t>(layout.ranks));
  on_ranks(make_local_group(layout.ranks), [&](int rank, Communicator& link) {
    const auto device = open_cpu();
    const std::vector<TokenRun> runs = layout.runs(rank);
    const Bytes q = c.of(c.q, c.q_row, runs), k = c.of(c.k, c.k_row, runs), v = c.of(c.v, c.v_row, runs);
    Bytes out(c.of(c.out, c.o_row, runs).size());
    ContextAttention attention(device.get(), link, c.problem, layout, schedule, order);
    const Traffic before = link.traffic();
    attention.forward({q.data(), k.data(), v.data()}, out.data(), nullptr);
    const Traffic after = link.traffic();
    bytes[static_cast<size_t>(rank)] = {static_cast<int64_t>(after.bytes_sent - before.bytes_sent),
                                        static_cast<int64_t>(after.bytes_received - before.bytes_received)};
  });
  return bytes;
}

TEST(ContextAttention, MeasuredBytesAreTheFormulaToTheByte) {
  ContextProblem p = small_problem();
  p.heads = 2;
  p.kv_heads = 1;
  p.head_dim = p.value_dim = 8;
  for (const int n : {2, 3, 4, 6, 8}) {
    const int64_t tokens = 2 * n * kContextChunk;
    const WholeCase c(p, {tokens});
    const ContextLayout layout = zigzag_layout(c.lengths, n);
    for (const ContextSchedule& schedule : schedules_of(layout)) {
      for (const PartialOrder order : {PartialOrder::kExact, PartialOrder::kCompact}) {
        EXPECT_EQ(measured_bytes(c, layout, schedule, order),
                  forward_bytes(schedule, layout, p.mask, p.shape(), order))
            << schedule.name << " of " << n;
      }
    }
    for (int a = 1; a <= n; ++a) {
      if (n % a != 0) continue;
      const auto formula = static_cast<int64_t>(formula_bytes(p.shape(), tokens, a, n / a));
      for (const RankBytes& of :
           measured_bytes(c, layout, mesh_schedule(layout, a), PartialOrder::kCompact)) {
        EXPECT_EQ(of.sent, formula) << a << " of " << n;
        EXPECT_EQ(of.received, formula) << a << " of " << n;
      }
    }
  }
  // Where pieces are powers of two long, exact partials are as many as the formula's, over all ranks.
  for (const int n : {2, 4, 8}) {
    const int64_t tokens = 4 * n * kContextChunk;
    const ContextLayout layout = zigzag_layout({tokens}, n);
    int64_t total = 0;
    for (const RankBytes& of :
         forward_bytes(mesh_schedule(layout, 2), layout, p.mask, p.shape(), PartialOrder::kExact)) {
      total += of.received;
    }
    EXPECT_EQ(total, static_cast<int64_t>(n * formula_bytes(p.shape(), tokens, 2, n / 2))) << n;
  }
  // In elements, as it is written: ring 2 N d_kv (n - 1) / n.
  EXPECT_EQ(formula_bytes(p.shape(), 4096, 1, 4), 2.0 * 4096 * 8 * 3 / 4 * 2);
}

// The same where nothing is even: lengths that are primes, shorter than a chunk and empty, heads that share
// keys, values of another width than keys, windows, and 2, 5, 6 and 7 ranks, two of which share the work
// unevenly.
TEST(ContextAttention, MeasuredBytesOfUnevenCasesAreThePlansToTheByte) {
  ContextProblem p = small_problem();  // 4 heads, 2 of keys; keys of 16, values of 24
  for (const auto& [left, type] : {std::pair{int64_t{-1}, MR_BF16}, {int64_t{300}, MR_F16}}) {
    p.mask = {left, 0};
    p.type = type;
    const WholeCase c(p, {1699, 257, 0, 2, 1021});
    for (const int n : {2, 5, 6, 7}) {
      ContextLayout layout = zigzag_layout(c.lengths, n);
      for (const bool even : {true, false}) {
        if (!even) {  // rank 0 gets what was the last one's too
          for (std::vector<int>& owners : layout.owner) {
            for (int& owner : owners) owner = owner == n - 1 ? 0 : owner;
          }
        }
        std::vector<ContextSchedule> schedules = schedules_of(layout);
        if (left >= 0) schedules.push_back(window_schedule(layout, p.mask));
        for (const ContextSchedule& schedule : schedules) {
          const std::vector<RankBytes> planned =
              forward_bytes(schedule, layout, p.mask, p.shape(), PartialOrder::kExact);
          EXPECT_EQ(measured_bytes(c, layout, schedule, PartialOrder::kExact), planned)
              << schedule.name << " of " << n << (even ? "" : ", uneven");
          int64_t sent = 0, received = 0;
          for (const RankBytes& of : planned) sent += of.sent, received += of.received;
          EXPECT_EQ(sent, received);
          // Of two ranks, uneven, one has all tokens: their windows need nothing of the other.
          const bool needs_none = n == 2 && !even && left >= 0 && &schedule == &schedules.back();
          EXPECT_EQ(sent == 0, needs_none) << schedule.name << " of " << n;
        }
        // A ring moves everybody's keys and values to everybody, once, whatever the parts are.
        const auto ring = forward_bytes(schedules.front(), layout, p.mask, p.shape(), PartialOrder::kExact);
        int64_t moved = 0, tokens = 0;
        for (const RankBytes& of : ring) moved += of.received;
        for (const int64_t length : c.lengths) tokens += length;
        EXPECT_EQ(moved, (n - 1) * tokens * p.kv_heads * (p.head_dim + p.value_dim) * 2);
      }
    }
  }
}

TEST(ContextAttention, CompactPartialsAreCloseToOneDevice) {
  ContextProblem p = small_problem();
  p.type = MR_F32;
  const WholeCase c(p, {2300});
  const ContextLayout layout = zigzag_layout(c.lengths, 4);
  on_ranks(make_local_group(4), [&](int rank, Communicator& link) {
    const auto device = open_cpu();
    const std::vector<TokenRun> runs = layout.runs(rank);
    const Bytes q = c.of(c.q, c.q_row, runs), k = c.of(c.k, c.k_row, runs), v = c.of(c.v, c.v_row, runs),
                d_out = c.of(c.d_out, c.o_row, runs);
    Bytes out(d_out.size()), d_q(q.size()), d_k(k.size()), d_v(v.size());
    std::vector<float> lse(static_cast<size_t>(layout.rows(rank) * p.heads));
    ContextAttention attention(device.get(), link, p, layout, mesh_schedule(layout, 2),
                               PartialOrder::kCompact);
    attention.forward({q.data(), k.data(), v.data()}, out.data(), lse.data());
    attention.backward({q.data(), k.data(), v.data()},
                       {out.data(), lse.data(), d_out.data(), d_q.data(), d_k.data(), d_v.data(), nullptr});
    const auto expect_close = [&](const Bytes& got, const Bytes& want, const char* what) {
      for (size_t i = 0; i < got.size(); i += 4) {
        float a, b;
        std::memcpy(&a, got.data() + i, 4);
        std::memcpy(&b, want.data() + i, 4);
        ASSERT_NEAR(a, b, 2e-5f) << what;
      }
    };
    expect_close(out, c.of(c.out, c.o_row, runs), "out");
    expect_close(d_q, c.of(c.d_q, c.q_row, runs), "d_q");
    expect_close(d_k, c.of(c.d_k, c.k_row, runs), "d_k");
    expect_close(d_v, c.of(c.d_v, c.v_row, runs), "d_v");
  });
}

TEST(ContextAttention, DecodesWithKeysOverRanksAsOneDevice) {
  const float sinks[] = {0.5f, 1.0f, -2.0f, 0.0f};
  ContextProblem p = small_problem();
  p.sinks = sinks;
  for (const ContextMask mask : {ContextMask{-1, 0}, ContextMask{600, 0}}) {
    p.mask = mask;
    for (const int ranks : {1, 3, 8}) {
      ContextLayout layout = zigzag_layout({1270, 5, 255}, ranks);
      for (int token = 0; token < 12; ++token) {  // into a new chunk of two of them
        for (int s = 0; s < 3; ++s) append_token(layout, s);
      }
      const WholeCase c(p, layout.lengths);
      for (const int queries : {1, 4}) {
        std::vector<TokenRun> last;
        for (int s = 0; s < 3; ++s) {
          const int64_t length = layout.lengths[static_cast<size_t>(s)];
          last.push_back({s, length - queries, length});
        }
        const Bytes q = c.of(c.q, c.q_row, last), want = c.of(c.out, c.o_row, last);
        on_ranks(make_local_group(ranks), [&](int rank, Communicator& link) {
          const auto device = open_cpu();
          const std::vector<TokenRun> runs = layout.runs(rank);
          const Bytes k = c.of(c.k, c.k_row, runs), v = c.of(c.v, c.v_row, runs);
          Bytes out(want.size());
          context_decode(device.get(), link, p, layout, queries, {q.data(), k.data(), v.data()}, out.data());
          EXPECT_TRUE(out == want) << ranks << " ranks, " << queries << " queries";
          EXPECT_EQ(static_cast<int64_t>(link.traffic().bytes_received),
                    decode_bytes(layout, p, queries, rank));
        });
      }
    }
  }
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(ContextAttention, BadPlansAreRefusedByName) {
  const ContextLayout layout = zigzag_layout({3000}, 4);
  const auto group = make_local_group(1);
  const auto device = open_cpu();
  const ContextProblem p = small_problem();
  const auto refused = [&](const std::function<void()>& f, const char* word) {
    EXPECT_NE(error_of(f).find(word), std::string::npos) << error_of(f) << ", expected " << word;
  };
  refused([] { zigzag_layout({5}, 0); }, "ranks is 0");
  refused([] { zigzag_layout({-5}, 2); }, "lengths[0] is -5");
  refused([&] { mesh_schedule(layout, 3); }, "a is 3");
  refused([&] { wallfacer_schedule(layout, 4); }, "team is 4");
  refused([&] { ContextAttention(device.get(), *group[0], p, layout, ring_schedule(layout)); },
          "layout.ranks is 4");
  ContextLayout wrong = layout;
  wrong.owner[0][2] = 9;
  refused([&] { check_layout(wrong); }, "names rank 9");
  wrong.owner[0].pop_back();
  refused([&] { check_layout(wrong); }, "11 chunks, expected 12");
  ContextSchedule schedule = ring_schedule(layout);
  schedule.steps[1].tiles[0].clear();
  refused([&] { check_schedule(schedule, layout, p.mask); }, "tile 0 x 3 is never computed");
  schedule = ring_schedule(layout);
  schedule.steps[0].moves.clear();
  refused([&] { check_schedule(schedule, layout, p.mask); }, "lacks what tile");
  schedule = ring_schedule(layout);
  schedule.steps[1].tiles[1].push_back({1, 0});
  refused([&] { check_schedule(schedule, layout, p.mask); }, "computed twice");
  schedule = ring_schedule(layout);
  schedule.steps[0].moves[0].owner = 2;
  refused([&] { check_schedule(schedule, layout, p.mask); }, "sends what it lacks");
  ContextProblem odd = p;
  odd.heads = 3;
  const ContextLayout one = zigzag_layout({100}, 1);
  refused([&] { ContextAttention(device.get(), *group[0], odd, one, ring_schedule(one)); },
          "problem.heads is 3");
  odd = p;
  odd.value_dim = 12;
  refused([&] { ContextAttention(device.get(), *group[0], odd, one, ring_schedule(one)); },
          "problem.value_dim is 12");
}

TEST(ContextPlan, ZigzagHandsOutEveryTokenOnceAndEvenly) {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    for (const int64_t length : {int64_t{0}, int64_t{1}, int64_t{255}, int64_t{257}, int64_t{100003}}) {
      const ContextLayout layout = zigzag_layout({length, 7}, ranks);
      check_layout(layout);
      int64_t total = 0, pairs = 0, most = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        int64_t work = 0;  // of causal attention
        for (const TokenRun& run : layout.runs(rank)) work += (run.first + run.last) * run.rows() / 2;
        total += layout.rows(rank);
        pairs += work;
        most = std::max(most, work);
      }
      EXPECT_EQ(total, length + 7);
      if (length > 100000) {
        EXPECT_LE(static_cast<double>(most), 1.04 * static_cast<double>(pairs) / ranks) << ranks;
      }
    }
  }
}

TEST(ContextPlan, ShortSequencesBeginAtOneRankAfterTheOther) {
  const ContextLayout layout = zigzag_layout(std::vector<int64_t>(8, 100), 4);
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(layout.rows(rank), 200) << rank;
}

TEST(ContextPlan, NodesOfASpanCoverItAndNoMore) {
  std::mt19937 random(3);
  for (int i = 0; i < 300; ++i) {
    const int64_t first = random() % 40, last = first + 1 + random() % 60;
    const int64_t from = random() % 100, to = from + 1 + random() % 40;
    const ChunkRange all{first, last}, part = intersection(all, {from, to});
    int64_t at = part.first;
    for (const ChunkNode& node : nodes_of(all, ChunkRange{from, to})) {
      const ChunkRange span = intersection(node.span(), all);
      EXPECT_EQ(span.first, at);
      at = span.last;
    }
    if (!part.empty()) {
      EXPECT_EQ(at, part.last);
    }
  }
  EXPECT_EQ(nodes_of({0, 8}, ChunkRange{0, 8}), (std::vector<ChunkNode>{{3, 0}}));
  EXPECT_EQ(nodes_of({0, 8}, ChunkRange{1, 4}), (std::vector<ChunkNode>{{0, 1}, {1, 1}}));
}

TEST(ContextPlan, TheFormulaChoosesTheMesh) {
  ContextShape shape{32, 32, 128, 128,
                     2};  // as many KV heads: queries and outputs cost 1.5 times keys and values
  EXPECT_EQ(best_mesh(shape, 1), 1);
  EXPECT_EQ(best_mesh(shape, 64), 8);
  shape.kv_heads = 4;  // keys and values are cheap: more of them go round
  EXPECT_EQ(best_mesh(shape, 64), 2);
  for (int n = 1; n <= 64; ++n) {
    const int a = best_mesh(shape, n);
    EXPECT_EQ(n % a, 0);
    EXPECT_LE(formula_bytes(shape, 1 << 20, a, n / a), formula_bytes(shape, 1 << 20, 1, n));
  }
}

}  // namespace
}  // namespace millrace::dist
