// The pool keeps few idle devices. After fork() the child has none of the parent's threads: it starts with an
// empty pool, and what the parent had is left where it lies.
#include "python/kernels/src/device_pool.h"

#include <pthread.h>

#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <vector>

namespace millrace::bindings {
namespace {

constexpr size_t kMaxIdle = 8;             // devices; one beyond is closed
constexpr size_t kMaxKept = 64 << 20;      // bytes of scratch that stay with an idle device
constexpr size_t kScratchAlignment = 256;  // of workspaces in the C API

struct Idle {
  int kind;
  mr_device* device;
  void* scratch;
  size_t scratch_bytes;
};

struct Pool {
  std::mutex mutex;
  std::vector<Idle> idle;  // the last given back is at the end
};

Pool* current_pool = nullptr;
std::once_flag pool_made;

Pool* pool() {
  std::call_once(pool_made, [] {
    current_pool = new Pool;  // never freed: calls may outlive static destructors
    pthread_atfork(nullptr, nullptr, [] { current_pool = new Pool; });
  });
  return current_pool;
}

mr_device* open(int kind) {
  mr_device* device = nullptr;
  if (kind >= 0) {
    const mr_device_options options{kind, nullptr};
    check(mr_device_open("cpu", &options, &device));
  } else {
    check(mr_device_open(("cuda:" + std::to_string(-1 - kind)).c_str(), nullptr, &device));
  }
  return device;
}

Idle take(Pool& from, int kind) {
  const std::lock_guard<std::mutex> lock(from.mutex);
  for (size_t i = from.idle.size(); i > 0; --i) {
    if (from.idle[i - 1].kind != kind) continue;
    const Idle found = from.idle[i - 1];
    from.idle.erase(from.idle.begin() + static_cast<std::ptrdiff_t>(i - 1));
    return found;
  }
  return {kind, nullptr, nullptr, 0};
}

}  // namespace

void check(mr_status status) {
  if (status != MR_OK) throw std::runtime_error(std::string("millrace: ") + mr_last_error());
}

DeviceLease::DeviceLease(int kind, mr_stream stream) : kind_(kind), stream_(stream) {
  Pool* from = pool();
  pool_ = from;
  const Idle found = take(*from, kind);
  device_ = found.device != nullptr ? found.device : open(kind);
  scratch_ = found.scratch;
  scratch_bytes_ = found.scratch_bytes;
}

void* DeviceLease::scratch(size_t bytes) {
  if (bytes <= scratch_bytes_) return scratch_;
  std::free(scratch_);
  scratch_bytes_ = 0;
  const size_t whole = (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
  scratch_ = std::aligned_alloc(kScratchAlignment, whole);
  if (scratch_ == nullptr)
    throw std::runtime_error("millrace: no memory for a workspace of " + std::to_string(bytes));
  scratch_bytes_ = whole;
  return scratch_;
}

DeviceLease DeviceLease::cpu(int threads) { return {threads, nullptr}; }
DeviceLease DeviceLease::cuda(int ordinal, mr_stream stream) { return {-1 - ordinal, stream}; }

DeviceLease::~DeviceLease() {
  Pool* to = pool();
  if (to != pool_) return;
  if (scratch_bytes_ > kMaxKept) {
    std::free(scratch_);
    scratch_ = nullptr;
    scratch_bytes_ = 0;
  }
  Idle surplus{0, nullptr, nullptr, 0};
  {
    const std::lock_guard<std::mutex> lock(to->mutex);
    if (to->idle.size() == kMaxIdle) {
      surplus = to->idle.front();
      to->idle.erase(to->idle.begin());
    }
    to->idle.push_back({kind_, device_, scratch_, scratch_bytes_});
  }
  std::free(surplus.scratch);
  if (surplus.device != nullptr) mr_device_close(surplus.device);
}

}  // namespace millrace::bindings
