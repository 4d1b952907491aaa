// NCCL, opened when it is asked for: a program that has none runs staged. Its header is not needed either:
// the handful of functions below have had these types since NCCL 2.0, and what a version of another number
// has is not used.
#include "backend/cuda/nccl_link.h"

#include <dlfcn.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"

namespace millrace::cuda {
namespace {

using NcclComm = struct OpaqueNcclComm*;
struct NcclId {
  std::array<char, 128> bytes{};
};
constexpr int kNcclSuccess = 0, kNcclFloat32 = 7;
constexpr int kNcclMajor = 2;

struct NcclLibrary {
  void* handle = nullptr;
  std::string fault;
  int version = 0;

  int (*get_version)(int*) = nullptr;
  int (*get_unique_id)(NcclId*) = nullptr;
  int (*comm_init_rank)(NcclComm*, int, NcclId, int) = nullptr;
  int (*comm_destroy)(NcclComm) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*broadcast)(const void*, void*, size_t, int, int, NcclComm, cudaStream_t) = nullptr;
  const char* (*get_error_string)(int) = nullptr;

  template <class T>
  void find(T& to, const char* name) {
    void* symbol = dlsym(handle, name);
    if (symbol == nullptr && fault.empty()) fault = fmt::format("it has no {}", name);
    to = reinterpret_cast<T>(symbol);
  }

  // Stays open: its threads may outlive the last communicator.
  NcclLibrary() {
    handle = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* const why = dlerror();
      fault = why == nullptr ? "libnccl.so.2 is not there" : why;
      return;
    }
    find(get_version, "ncclGetVersion");
    find(get_unique_id, "ncclGetUniqueId");
    find(comm_init_rank, "ncclCommInitRank");
    find(comm_destroy, "ncclCommDestroy");
    find(group_start, "ncclGroupStart");
    find(group_end, "ncclGroupEnd");
    find(broadcast, "ncclBroadcast");
    find(get_error_string, "ncclGetErrorString");
    if (!fault.empty()) return;
    check(get_version(&version), "ncclGetVersion");
    if (version / 10000 != kNcclMajor) fault = fmt::format("version {}, expected NCCL 2", version_text());
  }

  // 22803 is 2.28.3.
  std::string version_text() const {
    return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  }
  void check(int status, const char* call) const {
    if (status == kNcclSuccess) return;
    throw_error(ErrorCode::kDevice, "NCCL {}: {}", call, get_error_string(status));
  }
};

class NcclLink final : public DeviceLink {
 public:
  NcclLink(dist::Communicator& group, const Device& device) {
    if (!nccl_.fault.empty()) throw_error(ErrorCode::kUnsupported, "NCCL: {}", nccl_.fault);
    device.use();
    NcclId id;
    if (group.rank() == 0) nccl_.check(nccl_.get_unique_id(&id), "ncclGetUniqueId");
    group.broadcast(0, std::as_writable_bytes(std::span(id.bytes)));
    nccl_.check(nccl_.comm_init_rank(&comm_, group.size(), id, group.rank()), "ncclCommInitRank");
    connect(device, group.size());
  }
  ~NcclLink() override {
    if (comm_ != nullptr) nccl_.comm_destroy(comm_);
  }
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  std::string name() const override { return "nccl " + nccl_.version_text(); }
  bool blocks() const override { return false; }

  // Parts differ in length, so everybody sends its own to all: one group of broadcasts.
  void all_gather(const float* mine, float* all, std::span<const int64_t> counts, const Launch& at) override {
    nccl_.check(nccl_.group_start(), "ncclGroupStart");
    int64_t before = 0;
    int status = kNcclSuccess;
    for (size_t r = 0; r < counts.size(); ++r) {
      if (counts[r] > 0 && status == kNcclSuccess) {
        status = nccl_.broadcast(mine, all + before, static_cast<size_t>(counts[r]), kNcclFloat32,
                                 static_cast<int>(r), comm_, at.stream);
      }
      before += counts[r];
    }
    const int ended = nccl_.group_end();
    nccl_.check(status, "ncclBroadcast");
    nccl_.check(ended, "ncclGroupEnd");
  }

 private:
  // The first call connects ranks, which is not for a graph's capture.
  void connect(const Device& device, int ranks) {
    const Stream stream;
    const DeviceBuffer mine(sizeof(float), "a first exchange"),
        all(static_cast<size_t>(ranks) * sizeof(float), "a first exchange");
    MILLRACE_CUDA_TRY(cudaMemsetAsync(mine.as<void>(), 0, mine.bytes(), stream.get()));
    const std::vector<int64_t> counts(static_cast<size_t>(ranks), 1);
    all_gather(mine.as<float>(), all.as<float>(), counts, {device, stream.get()});
    stream.synchronize();
  }

  NcclLibrary nccl_;
  NcclComm comm_ = nullptr;
};

}  // namespace

NcclFound find_nccl() {
  const NcclLibrary nccl;
  return {nccl.fault.empty() ? nccl.version_text() : "", nccl.fault};
}

std::unique_ptr<DeviceLink> make_nccl_link(dist::Communicator& group, const Device& device) {
  return std::make_unique<NcclLink>(group, device);
}

}  // namespace millrace::cuda
