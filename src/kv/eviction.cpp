#include "kv/eviction.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/check.h"

namespace millrace::kv {

// ---------------------------------------------------------------- heap

void Heap::place(int32_t i, const Entry& entry) {
  heap_[i] = entry;
  where_[entry.second] = i;
}

void Heap::up(int32_t i) {
  const Entry entry = heap_[i];
  for (; i > 0 && entry < heap_[(i - 1) / 2]; i = (i - 1) / 2) place(i, heap_[(i - 1) / 2]);
  place(i, entry);
}

void Heap::down(int32_t i) {
  const Entry entry = heap_[i];
  while (2 * i + 1 < size()) {
    int32_t child = 2 * i + 1;
    if (child + 1 < size() && heap_[child + 1] < heap_[child]) ++child;
    if (entry < heap_[child]) break;
    place(i, heap_[child]);
    i = child;
  }
  place(i, entry);
}

void Heap::reserve(int32_t ids) {
  const auto count = static_cast<size_t>(ids);
  if (heap_.capacity() < count) heap_.reserve(std::max(count, 2 * heap_.capacity()));
  if (where_.size() < count) where_.resize(std::max(count, 2 * where_.size()), -1);
}

void Heap::set(int32_t id, Priority priority) {
  if (id >= static_cast<int32_t>(where_.size())) where_.resize(id + 1, -1);
  if (where_[id] < 0) {
    where_[id] = size();
    heap_.push_back({priority, id});
  } else {
    heap_[where_[id]].first = priority;
  }
  up(where_[id]);
  down(where_[id]);
}

void Heap::erase(int32_t id) {
  if (!contains(id)) return;
  const int32_t i = std::exchange(where_[id], -1);
  const Entry last = heap_.back();
  heap_.pop_back();
  if (last.second == id) return;
  place(i, last);
  up(i);
  down(where_[last.second]);
}

// ---------------------------------------------------------------- evictor

namespace {
constexpr double kLearningRate = 0.45;  // LeCaR's
// Blocks never found again leave first while they are more than once_target_, so that single questions do not
// push out the prompt they share. The target begins here and moves with what the ghosts say (ARC's): such a
// block that comes back left too early, and any other that comes back had to leave because of them.
constexpr double kOnceStart = 0.25, kOnceLeast = 0.02;  // of the pool
constexpr double kOnceUp = 1, kOnceDown = 2;            // blocks, per block that came back
constexpr double kLeastWeight = 0.01;  // an expert that was always wrong is still asked now and then
}  // namespace

Evictor::Evictor(Eviction policy, int32_t num_blocks, uint64_t seed, int32_t run)
    : policy_(policy),
      num_blocks_(std::max(num_blocks, 1)),
      num_experts_(run > 1 ? 2 : 3),
      state_(seed * 2 + 1),
      run_(run) {
  recent_.reserve(num_blocks_);
  frequent_.reserve(num_blocks_);
  once_.reserve(num_blocks_);
  if (policy != Eviction::kAdaptive) {
    weights_[static_cast<size_t>(policy)] = 1;
    return;
  }
  weights_ = {0.45, 0.45, 0.1};  // random choices spoil chains: they have to earn more
  if (num_experts_ == 2) weights_ = {0.5, 0.5, 0.0};
  once_target_ = kOnceStart * num_blocks_;
  ghosts_.resize(std::bit_ceil(2 * static_cast<size_t>(num_blocks_)));
}

uint64_t Evictor::random() {  // splitmix64
  uint64_t z = state_ += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

void Evictor::add(int32_t block, uint64_t last_use, uint64_t uses) {
  recent_.set(block, {last_use, 0});
  frequent_.set(block, {uses, last_use});
  if (uses == 0) {
    once_.set(block, {last_use, 0});
  } else {
    once_.erase(block);
  }
}

void Evictor::remove(int32_t block) {
  recent_.erase(block);
  frequent_.erase(block);
  once_.erase(block);
}

Evictor::Expert Evictor::draw() {
  static_assert(static_cast<int>(Eviction::kLru) == kLruExpert &&
                static_cast<int>(Eviction::kLfu) == kLfuExpert &&
                static_cast<int>(Eviction::kRandom) == kRandomExpert);
  if (policy_ != Eviction::kAdaptive) return static_cast<Expert>(policy_);
  if (left_of_run_-- > 0) return last_;
  left_of_run_ = run_ - 1;
  const double x = static_cast<double>(random() >> 11) * 0x1p-53;
  return x < weights_[0] ? kLruExpert : x < weights_[0] + weights_[1] ? kLfuExpert : kRandomExpert;
}

int32_t Evictor::choose() {
  if (recent_.empty()) return kNoBlock;
  if (policy_ == Eviction::kAdaptive && once_.size() > once_target_) {
    last_ = kOnce;
    left_of_run_ = 0;
    return once_.top();
  }
  last_ = draw();
  switch (last_) {
    case kLfuExpert:
      return frequent_.top();
    case kRandomExpert:
      return recent_.at(static_cast<int32_t>(random() % static_cast<uint64_t>(recent_.size())));
    default:
      return recent_.top();
  }
}

void Evictor::evicted(const BlockKey& key, uint64_t uses) {
  ++evictions_;
  if (ghosts_.empty()) return;
  uint64_t name;
  std::memcpy(&name, key.bytes.data() + 8, sizeof(name));
  ghost_of(key) = {name, evictions_, last_, uses > 0};
}

void Evictor::returned(const BlockKey& key) {
  if (ghosts_.empty()) return;
  Ghost& ghost = ghost_of(key);
  uint64_t name;
  std::memcpy(&name, key.bytes.data() + 8, sizeof(name));
  if (ghost.expert == kNobody || ghost.name != name) return;
  const double age = static_cast<double>(evictions_ - ghost.when) / num_blocks_;
  if (age <= 2) {
    once_target_ = ghost.found_again ? std::max(once_target_ - kOnceDown, kOnceLeast * num_blocks_)
                                     : std::min(once_target_ + kOnceUp, 1.0 * num_blocks_);
  }
  if (age <= 2 && ghost.expert != kOnce) {
    // 0.005 ^ age: a block that was gone for a whole pool's worth of evictions proves little.
    weights_[ghost.expert] *= std::exp(-kLearningRate * std::pow(0.005, age));
    double sum = 0;
    for (int i = 0; i < num_experts_; ++i) sum += weights_[i] = std::max(weights_[i], kLeastWeight);
    for (int i = 0; i < num_experts_; ++i) weights_[i] /= sum;
  }
  ghost.expert = kNobody;
}

}  // namespace millrace::kv
