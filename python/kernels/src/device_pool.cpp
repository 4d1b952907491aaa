// The pool keeps few idle devices. After fork() the child has none of the parent's threads: it starts with an
// empty pool, and what the parent had is left where it lies.
#include "device_pool.h"

#include <pthread.h>

#include <mutex>
#include <stdexcept>
#include <vector>

namespace millrace::bindings {
namespace {

constexpr size_t kMaxIdle = 8;  // devices; one beyond is closed

struct Idle {
  int kind;
  mr_device* device;
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

mr_device* take(Pool& from, int kind) {
  const std::lock_guard<std::mutex> lock(from.mutex);
  for (size_t i = from.idle.size(); i > 0; --i) {
    if (from.idle[i - 1].kind != kind) continue;
    mr_device* device = from.idle[i - 1].device;
    from.idle.erase(from.idle.begin() + static_cast<std::ptrdiff_t>(i - 1));
    return device;
  }
  return nullptr;
}

}  // namespace

void check(mr_status status) {
  if (status != MR_OK) throw std::runtime_error(std::string("millrace: ") + mr_last_error());
}

DeviceLease::DeviceLease(int kind, mr_stream stream) : kind_(kind), stream_(stream) {
  Pool* from = pool();
  pool_ = from;
  device_ = take(*from, kind);
  if (device_ == nullptr) device_ = open(kind);
}

DeviceLease DeviceLease::cpu(int threads) { return {threads, nullptr}; }
DeviceLease DeviceLease::cuda(int ordinal, mr_stream stream) { return {-1 - ordinal, stream}; }

DeviceLease::~DeviceLease() {
  Pool* to = pool();
  if (to != pool_) return;
  mr_device* surplus = nullptr;
  {
    const std::lock_guard<std::mutex> lock(to->mutex);
    if (to->idle.size() == kMaxIdle) {
      surplus = to->idle.front().device;
      to->idle.erase(to->idle.begin());
    }
    to->idle.push_back({kind_, device_});
  }
  if (surplus != nullptr) mr_device_close(surplus);
}

}  // namespace millrace::bindings
