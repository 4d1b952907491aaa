// What threads that wait between the products of decode prefetch: the first rows of the product after this
// one. A model runs the same products in every step, so what each began with in the last step is what it
// begins with in this one; a wrong guess costs some reading. Steps of many rows prefetch nothing so.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "base/thread_pool.h"

namespace millrace::cpu {

class PrefetchOrder {
 public:
  // max_products: of a step, that are remembered.
  explicit PrefetchOrder(size_t max_products) { order_.reserve(max_products); }

  void begin_step(ThreadPool& pool, bool small_batch) {
    next_ = 0;
    small_batch_ = small_batch;
    if (!small_batch) pool.prefetch_while_waiting({});
  }

  // A product begins that reads `mine` first; threads that wait from now on prefetch what the one after it
  // does, or `following` where the caller knows it.
  void begin_product(ThreadPool& pool, const FirstReads& mine, const FirstReads* following = nullptr) {
    if (!small_batch_) return;
    if (next_ == order_.size() && order_.size() < order_.capacity()) order_.emplace_back();
    if (next_ < order_.size()) order_[next_++] = mine;
    if (std::exchange(paused_, false)) {
      pool.prefetch_while_waiting({});
      return;
    }
    pool.prefetch_while_waiting(following != nullptr ? *following
                                                     : order_[next_ < order_.size() ? next_ : 0]);
  }

  // Attention over a long context follows the next product: it would push out what was prefetched.
  void pause_after_next_product(bool pause) { paused_ = pause; }
  // That attention begins: from its end on threads prefetch again.
  void resume(ThreadPool& pool) {
    if (next_ < order_.size()) pool.prefetch_while_waiting(order_[next_]);
  }

 private:
  std::vector<FirstReads> order_;
  size_t next_ = 0;  // the product that comes next
  bool small_batch_ = false, paused_ = false;
};

}  // namespace millrace::cpu
