// Sampling: a cluster of 8 CTAs takes a row of logits into its shared memory (100 KB each for a vocabulary of
// 201,088), so that the row is read once however many passes its parameters need:
//   load, largest -> (logprobs) -> penalties, bias, mask, largest -> weights -> top-k -> top-p -> draw
// Cuts are radix selects over the weights' bits, ten at a time. All sums are of whole numbers (units of
// base/sampling_math.h, or counts), so that neither the order of atomics nor the number of threads matters,
// and the token is the host sampler's. Nothing depends on the other rows.
//
// Roofline: one row is latency: about 12 barriers of the cluster for a plain draw, 9 more for each cut. 128
// rows: 103 MB / B = 24 us, then 4 turns of shared memory passes, since two CTAs fit an SM.
#include <cooperative_groups.h>

#include "base/sampling_math.h"
#include "kernels/cuda/sample/best.cuh"
#include "kernels/cuda/sample/sample.h"
#include "kernels/cuda/tile/launch.cuh"
#include "millrace/kernels/tile/ptx/grid_dependency.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma nv_diag_suppress 177  // unused: for this architecture the kernel is empty
#endif

namespace millrace::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kCluster = 8;
// Of a CTA: all that fit where a small batch leaves the rest of the GPU idle, else half, so that one CTA of
// an SM works while the other waits for its cluster. The token does not depend on it.
constexpr int kSmallBatchThreads = 1024, kLargeBatchThreads = 512;
constexpr int64_t kSmallBatch = 16;  // clusters that run at once, one CTA to an SM
constexpr int kMaxWarps = kSmallBatchThreads / kWarpLanes;
constexpr int kBinBits = 10, kBins = 1 << kBinBits, kLevels = 3;  // weights in [0, 1] have 30 bits
constexpr int kOwnBins = kBins / kCluster;
// A bin's units as three sums of 32 bits, which have atomics of their own in shared memory: 14 bits of each
// term in the lower two, so that 2^17 terms fit.
constexpr int kPlanes = 3, kPlaneBits = 14;
constexpr uint32_t kPlaneMask = (1u << kPlaneBits) - 1;
constexpr int32_t kNothing = -2, kLeft = -3;  // SampledRow

struct Slot {  // what a CTA tells the others
  uint64_t sum;
  Best best;
};

struct Shared {
  uint32_t planes[kPlanes][kBins];  // this CTA's part of the row
  uint64_t totals[kOwnBins];        // the whole row's, of the bins this CTA adds up
  uint64_t warp_sums[kMaxWarps];
  Slot slots[2];  // in turn: one is written while the others may still read the other
  Best warp_bests[kMaxWarps];
  Best top[kMaxTopLogits];  // of this CTA's part
  struct {
    uint64_t left, total;
    int32_t bin;
  } found_bin;
  int32_t found;
};

__host__ __device__ inline int64_t part_of(int64_t vocab) { return (vocab + kCluster - 1) / kCluster; }
size_t shared_bytes(int64_t vocab) { return sizeof(Shared) + static_cast<size_t>(part_of(vocab)) * 4; }

__device__ inline uint64_t warp_sum_units(uint64_t value) {
#pragma unroll
  for (int distance = kWarpLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// Inclusive, by lane.
__device__ inline uint64_t warp_prefix(uint64_t value, int lane) {
#pragma unroll
  for (int distance = 1; distance < kWarpLanes; distance *= 2) {
    const uint64_t before = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

// The last weight kept, and its token: those with a larger weight stay, at equal weight those with a lower or
// equal id.
struct Cut {
  uint32_t key = 0;
  int32_t id = INT_MAX;
  __device__ bool keeps(uint32_t other, int32_t token) const {
    return other > key || (other == key && token <= id);
  }
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // older GPUs have no clusters: supports_sampling

// One row, seen by one thread of its cluster. All members must be called by every thread of the cluster, with
// the same arguments.
template <int kThreads>
class RowSampler {
 public:
  static constexpr int kWarps = kThreads / kWarpLanes;

  __device__ RowSampler(Shared& shared, float* values, int64_t vocab)
      : shared_(shared),
        values_(values),
        cluster_(cg::this_cluster()),
        rank_(static_cast<int>(cluster_.block_rank())),
        warp_(threadIdx.x / kWarpLanes),
        lane_(threadIdx.x % kWarpLanes) {
    const int64_t part = part_of(vocab);
    begin_ = static_cast<int32_t>(min(rank_ * part, vocab));
    count_ = static_cast<int32_t>(min(part, vocab - begin_));
    const int chunk = (count_ + kThreads - 1) / kThreads * kWarpLanes;  // of a warp, whole turns
    first_ = min(warp_ * chunk, count_);
    last_ = min(first_ + chunk, count_);
  }

  __device__ int32_t run(const float* logits, int64_t vocab, const SampleParams& p, const SampleParams* base,
                         SampleDetails* details);
  // Nobody reads this CTA's shared memory any more.
  __device__ void finish() { cluster_.sync(); }
  __device__ bool leads() const { return rank_ == 0 && threadIdx.x == 0; }

 private:
  // Calls body(index in values_) for this thread's part; a warp's is contiguous.
  template <class Body>
  __device__ void each(Body&& body) const {
#pragma unroll 4
    for (int i = first_ + lane_; i < last_; i += kWarpLanes) body(i);
  }

  __device__ Best load(const float* row);
  __device__ void adjust(const SampleParams& p, const SampleParams* base);
  __device__ void note_logprobs(int wanted, Best largest, SampleDetails& out);
  template <class Measure>
  __device__ Cut select(const Cut& cut, uint64_t target, Measure&& measure);
  __device__ void add_planes();
  __device__ bool find_bin(uint64_t target);
  template <class Measure>
  __device__ uint64_t measure_part(Measure&& measure) const {
    uint64_t sum = 0;
    each([&](int i) { sum += measure(values_[i], begin_ + i); });
    return sum;
  }
  template <class Measure>
  __device__ int32_t find_in_order(const uint64_t* known, double uniform, uint64_t part, Measure&& measure);

  // Thread 0's slot goes to everybody: lane r has that of CTA r, lanes from 8 on a neutral one.
  __device__ Slot exchange(const Slot& mine) {
    if (threadIdx.x == 0) shared_.slots[turn_] = mine;
    cluster_.sync();  // all slots are there
    Slot slot{0, {}};
    if (lane_ < kCluster) slot = *cluster_.map_shared_rank(&shared_.slots[turn_], lane_);
    turn_ ^= 1;
    return slot;
  }
  __device__ Best cluster_best(Best mine) {
    mine = warp_best(mine);
    if (lane_ == 0) shared_.warp_bests[warp_] = mine;
    __syncthreads();  // every warp's is there
    Slot slot{0, {}};
    if (threadIdx.x == 0) {
      for (int w = 0; w < kWarps; ++w) slot.best = better(slot.best, shared_.warp_bests[w]);
    }
    return warp_best(exchange(slot).best);
  }
  // Leaves the warps' sums in shared_.warp_sums. Lane r gets the sum of CTA r.
  __device__ uint64_t cluster_sums(uint64_t mine) {
    mine = warp_sum_units(mine);
    if (lane_ == 0) shared_.warp_sums[warp_] = mine;
    __syncthreads();  // every warp's is there
    Slot slot{0, {}};
    if (threadIdx.x == 0) {
      for (int w = 0; w < kWarps; ++w) slot.sum += shared_.warp_sums[w];
    }
    return exchange(slot).sum;
  }
  __device__ uint64_t cluster_sum(uint64_t mine) { return warp_sum_units(cluster_sums(mine)); }

  Shared& shared_;
  float* values_;  // [count_] logits, then weights, of tokens from begin_ on
  cg::cluster_group cluster_;
  int rank_, warp_, lane_;
  int32_t begin_, count_, first_, last_;
  int turn_ = 0;
};

template <int kThreads>
__device__ Best RowSampler<kThreads>::load(const float* row) {
  constexpr int kAhead = 8;  // loads in flight of a lane: 32 KB of an SM
  Best best;
  for (int first = first_ + lane_; first < last_; first += kAhead * kWarpLanes) {
    float value[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = first + j * kWarpLanes;
      value[j] = i < last_ ? __ldcg(row + begin_ + i) : -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int i = first + j * kWarpLanes;
      if (i >= last_) break;
      values_[i] = value[j];
      best = better(best, {value[j], isnan(value[j]) ? -1 : begin_ + i});
    }
  }
  return cluster_best(best);
}

template <int kThreads>
__device__ void RowSampler<kThreads>::adjust(const SampleParams& p, const SampleParams* base) {
  const auto* counted = reinterpret_cast<const TokenCount*>(base) + p.counted;
  __syncthreads();  // all of the part is loaded, and read for logprobs, before others write to it
  for (int i = threadIdx.x; i < p.num_counted; i += kThreads) {
    const TokenCount c = counted[i];
    const int at = c.token - begin_;
    if (at < 0 || at >= count_) continue;
    values_[at] = sampling::penalized(values_[at], c.times, p.repetition, p.presence, p.frequency);
  }
  __syncthreads();  // penalties before bias
  const auto* biases = reinterpret_cast<const TokenBias*>(base) + p.bias;
  for (int i = threadIdx.x; i < p.num_bias; i += kThreads) {
    const TokenBias b = biases[i];
    const int at = b.token - begin_;
    if (at >= 0 && at < count_) values_[at] += b.bias;
  }
  __syncthreads();  // and everything before the mask, which each thread lays on its own part
  if (p.allowed < 0) return;
  const auto* allowed = reinterpret_cast<const uint64_t*>(base) + p.allowed;
  each([&](int i) {
    const int token = begin_ + i;
    if ((__ldg(allowed + token / 64) >> (token % 64) & 1) == 0) values_[i] = -INFINITY;
  });
}

// The likeliest of each part one after another, then the parts' lists merged by CTA 0.
template <int kThreads>
__device__ void RowSampler<kThreads>::note_logprobs(int wanted, Best largest, SampleDetails& out) {
  uint64_t units = 0;
  each([&](int i) { units += sampling::units_of(sampling::weight_of(values_[i], largest.value, 1.0f)); });
  units = cluster_sum(units);
  Best last{INFINITY, -1};
  for (int n = 0; n < wanted; ++n) {
    Best best;
    each([&](int i) {
      const Best candidate{values_[i], begin_ + i};
      const bool later =
          candidate.value < last.value || (candidate.value == last.value && candidate.index > last.index);
      if (later && candidate.value > -INFINITY) best = better(best, candidate);
    });
    best = warp_best(best);
    __syncthreads();  // the round before has been read
    if (lane_ == 0) shared_.warp_bests[warp_] = best;
    __syncthreads();  // every warp's is there
    last = Best{};
    for (int w = 0; w < kWarps; ++w) last = better(last, shared_.warp_bests[w]);
    if (threadIdx.x == 0) shared_.top[n] = last;
  }
  cluster_.sync();  // all lists are there
  if (rank_ == 0 && warp_ == 0) {
    int next = 0, found = 0;
    for (; found < wanted; ++found) {
      Best head;
      if (lane_ < kCluster && next < wanted) head = *cluster_.map_shared_rank(&shared_.top[next], lane_);
      const Best best = warp_best(head);
      if (best.index == INT_MAX) break;
      if (best.index == head.index) ++next;
      if (lane_ == 0) out.top[found] = {best.index, best.value};
    }
    if (lane_ == 0) {
      out.largest = largest.value;
      out.units = units;
      out.num_top = found;
    }
  }
}

// The whole row's sums of this CTA's bins: neighbouring threads share a bin, each has some of the parts.
template <int kThreads>
__device__ void RowSampler<kThreads>::add_planes() {
  constexpr int kSharers = kThreads / kOwnBins, kParts = kCluster / kSharers;
  static_assert(kSharers * kParts == kCluster);
  const int own = static_cast<int>(threadIdx.x) / kSharers, sharer = static_cast<int>(threadIdx.x) % kSharers;
  const int bin = rank_ * kOwnBins + own;
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const uint32_t* planes = cluster_.map_shared_rank(&shared_.planes[0][0], sharer * kParts + i);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      sum += uint64_t{planes[plane * kBins + bin]} << (plane * kPlaneBits);
    }
  }
#pragma unroll
  for (int distance = 1; distance < kSharers; distance *= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  if (sharer == 0) shared_.totals[own] = sum;
}

// The bin in which the sum from the highest bin down reaches the target: into shared_.found_bin. False when
// the sum of all does not.
template <int kThreads>
__device__ bool RowSampler<kThreads>::find_bin(uint64_t target) {
  constexpr int kBinsOfLane = kBins / kThreads;
  static_assert(kBinsOfLane * kThreads == kBins);
  const int upper = kBins - 1 - static_cast<int>(threadIdx.x) * kBinsOfLane;  // and those below it
  uint64_t sums[kBinsOfLane], mine = 0;
#pragma unroll
  for (int i = 0; i < kBinsOfLane; ++i) {
    const int bin = upper - i;
    sums[i] = cluster_.map_shared_rank(shared_.totals, bin / kOwnBins)[bin % kOwnBins];
    mine += sums[i];
  }
  const uint64_t through = warp_prefix(mine, lane_);
  if (lane_ == kWarpLanes - 1) shared_.warp_sums[warp_] = through;
  __syncthreads();  // every warp's is there
  uint64_t above = 0;
  int holder = 0;
  while (holder < kWarps && above + shared_.warp_sums[holder] < target) above += shared_.warp_sums[holder++];
  if (warp_ == holder) {
    above += through - mine;
#pragma unroll
    for (int i = 0; i < kBinsOfLane; ++i) {
      if (above < target && target <= above + sums[i])
        shared_.found_bin = {target - above, sums[i], upper - i};
      above += sums[i];
    }
  }
  __syncthreads();  // the bin is known; warp_sums may be written again
  return holder < kWarps;
}

// What stays when the likeliest are taken until their measures reach the target.
template <int kThreads>
template <class Measure>
__device__ Cut RowSampler<kThreads>::select(const Cut& cut, uint64_t target, Measure&& measure) {
  uint32_t prefix = 0;
  uint64_t left = target, total = 0;
  for (int level = 0; level < kLevels; ++level) {
    const int shift = kBinBits * (kLevels - 1 - level);
    for (int i = threadIdx.x; i < kPlanes * kBins; i += kThreads) (&shared_.planes[0][0])[i] = 0;
    __syncthreads();  // the planes are empty
    each([&](int i) {
      const uint32_t key = __float_as_uint(values_[i]);
      if (key == 0 || !cut.keeps(key, begin_ + i)) return;
      if (level > 0 && key >> (shift + kBinBits) != prefix) return;
      const uint32_t bin = key >> shift & (kBins - 1);
      const uint64_t term = measure(values_[i]);
      if (term == 0) return;
      atomicAdd(&shared_.planes[0][bin], static_cast<uint32_t>(term) & kPlaneMask);
      const auto middle = static_cast<uint32_t>(term >> kPlaneBits) & kPlaneMask;
      if (middle != 0) atomicAdd(&shared_.planes[1][bin], middle);
      const auto high = static_cast<uint32_t>(term >> (2 * kPlaneBits));
      if (high != 0) atomicAdd(&shared_.planes[2][bin], high);
    });
    cluster_.sync();  // all parts' planes are complete
    add_planes();
    cluster_.sync();  // all totals are there, and no plane is read any more
    if (!find_bin(left)) return cut;
    left = shared_.found_bin.left;
    total = shared_.found_bin.total;
    prefix = prefix << kBinBits | static_cast<uint32_t>(shared_.found_bin.bin);
  }
  // Equal weights: as many as are needed, in order of their ids.
  const uint64_t each_has = measure(__uint_as_float(prefix));
  const uint64_t before = (left + each_has - 1) / each_has - 1;
  if ((before + 1) * each_has == total) return {prefix, prefix == cut.key ? cut.id : INT_MAX};
  const auto equal = [&](float value, int32_t token) {
    const uint32_t key = __float_as_uint(value);
    return uint64_t{key == prefix && cut.keeps(key, token)};
  };
  return {prefix, find_in_order(&before, 0.0, measure_part(equal), equal)};
}

// The token at which the sum of measures, in order of ids, goes beyond *known; null: beyond the unit that the
// random number draws from the sum of all. `part`: measure_part(measure).
template <int kThreads>
template <class Measure>
__device__ int32_t RowSampler<kThreads>::find_in_order(const uint64_t* known, double uniform, uint64_t part,
                                                       Measure&& measure) {
  const uint64_t sums = cluster_sums(part);
  uint64_t left = known != nullptr ? *known : sampling::drawn_unit(uniform, warp_sum_units(sums));
  int owner = 0;
  for (; owner < kCluster - 1; ++owner) {
    const uint64_t here = __shfl_sync(kAllLanes, sums, owner);
    if (left < here) break;
    left -= here;
  }
  Slot slot{0, {}};
  if (rank_ == owner) {  // the whole CTA
    int holder = 0;
    while (holder < kWarps - 1 && left >= shared_.warp_sums[holder]) left -= shared_.warp_sums[holder++];
    if (warp_ == holder) {
      for (int base = first_; base < last_; base += kWarpLanes) {
        const int i = base + lane_;
        const uint64_t mine = i < last_ ? measure(values_[i], begin_ + i) : 0;
        const uint64_t through = warp_prefix(mine, lane_);
        if (through - mine <= left && left < through) shared_.found = begin_ + i;  // one lane at most
        const uint64_t all = __shfl_sync(kAllLanes, through, kWarpLanes - 1);
        if (left < all) break;
        left -= all;
      }
    }
    __syncthreads();  // it is found
    slot.best = {1.0f, shared_.found};
  }
  return warp_best(exchange(slot).best).index;
}

template <int kThreads>
__device__ int32_t RowSampler<kThreads>::run(const float* logits, int64_t vocab, const SampleParams& p,
                                             const SampleParams* base, SampleDetails* details) {
  Best best = load(logits);
  if (best.index < 0) return best.index;
  if (best.value == -INFINITY) return kNothing;
  if (p.logprobs >= 0) note_logprobs(p.logprobs, best, *details);
  if (p.num_counted > 0 || p.num_bias > 0 || p.allowed >= 0) {
    adjust(p, base);
    best = Best{};
    each([&](int i) { best = better(best, {values_[i], begin_ + i}); });
    best = cluster_best(best);
    if (best.value == -INFINITY) return kNothing;
  }
  if (p.mode == SampleParams::kGreedy) return best.index;
  uint64_t units = 0;  // of this thread's part of what is kept
  each([&](int i) {
    const float weight = sampling::weight_of(values_[i], best.value, p.scale);
    values_[i] = weight;
    units += sampling::units_of(weight);
  });
  Cut cut;
  const auto kept_units = [&cut](float weight, int32_t token) {
    return cut.keeps(__float_as_uint(weight), token) ? sampling::units_of(weight) : uint64_t{0};
  };
  if (p.top_k > 0 && p.top_k < vocab) {
    cut = select(cut, static_cast<uint64_t>(p.top_k), [](float) { return uint64_t{1}; });
    units = measure_part(kept_units);
  }
  if (p.top_p < 1.0f) {
    const uint64_t mass = sampling::units_of_mass(p.top_p, cluster_sum(units));
    cut = select(cut, mass, [](float weight) { return sampling::units_of(weight); });
  }
  if (p.min_p > 0.0f && __float_as_uint(p.min_p) > cut.key) cut = {__float_as_uint(p.min_p), INT_MAX};
  if (p.top_p < 1.0f || p.min_p > 0.0f) units = measure_part(kept_units);
  return find_in_order(nullptr, p.uniform, units, kept_units);
}

template <int kThreads>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1024 / kThreads)
    sample_kernel(const float* logits, int64_t vocab, const SampleParams* params, int32_t* tokens,
                  SampleDetails* details) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  const int64_t row = blockIdx.x / kCluster;
  const SampleParams p = params[row];
  if (p.mode == SampleParams::kSkip) {
    if (blockIdx.x % kCluster == 0 && threadIdx.x == 0) tokens[row] = kLeft;
    return;  // the whole cluster
  }
  RowSampler<kThreads> sampler(shared, reinterpret_cast<float*>(memory + sizeof(Shared)), vocab);
  const float* from = logits + row * vocab;
  const int32_t token = sampler.run(from, vocab, p, params, details + row);
  if (sampler.leads()) {
    tokens[row] = token;
    if (p.logprobs >= 0 && token >= 0) details[row].chosen = from[token];
  }
  sampler.finish();
}

#else
template <int kThreads>
__global__ void sample_kernel(const float*, int64_t, const SampleParams*, int32_t*, SampleDetails*) {}
#endif

constexpr int kTakeThreads = 256;
__global__ void __launch_bounds__(kTakeThreads)
    take_sampled_kernel(const int32_t* sampled, const int32_t* rows, int64_t count, int32_t* tokens) {
  ptx::let_dependents_start();
  ptx::wait_for_previous();
  const int64_t i = int64_t{blockIdx.x} * kTakeThreads + threadIdx.x;
  if (i < count && rows[i] >= 0) tokens[i] = max(0, sampled[rows[i]]);
}

}  // namespace

bool supports_sampling(int64_t vocab, const Device& device) {
  return device.has_bulk_copies() && vocab > 0 &&
         shared_bytes(vocab) <= device.max_shared_memory();  // clusters came with them
}

void launch_sample(const float* logits, int64_t rows, int64_t vocab, const SampleParams* params,
                   int32_t* tokens, SampleDetails* details, const Launch& at) {
  if (rows == 0) return;
  const size_t bytes = shared_bytes(vocab);
  const bool small_batch = rows <= kSmallBatch;
  const auto kernel = small_batch ? sample_kernel<kSmallBatchThreads> : sample_kernel<kLargeBatchThreads>;
  allow_shared_memory(kernel, bytes);
  kernel<<<static_cast<unsigned>(rows * kCluster), small_batch ? kSmallBatchThreads : kLargeBatchThreads,
           bytes, at.stream>>>(logits, vocab, params, tokens, details);
  check_launch("sample_kernel");
}

void launch_take_sampled(const int32_t* sampled, const int32_t* rows, int64_t count, int32_t* tokens,
                         const Launch& at) {
  if (count == 0) return;
  launch_dependent("take_sampled_kernel", take_sampled_kernel,
                   dim3(static_cast<unsigned>((count + kTakeThreads - 1) / kTakeThreads)), kTakeThreads, 0,
                   at, sampled, rows, count, tokens);
}

}  // namespace millrace::cuda
