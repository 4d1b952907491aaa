#include "backend/cuda/device_link.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <numeric>
#include <set>
#include <string_view>
#include <vector>

#include "backend/cuda/nccl_link.h"
#include "base/check.h"
#include "base/error.h"

namespace millrace::cuda {
namespace {

// Down to pinned memory, around the ranks, and up again. The part of the host's buffer that a copy up reads
// is written again only behind the wait of the next call, which that copy is in front of.
class StagedLink final : public DeviceLink {
 public:
  StagedLink(dist::Communicator& group, int64_t most)
      : group_(group),
        host_(static_cast<size_t>(std::max<int64_t>(1, most)) * sizeof(float), "what ranks exchange"),
        bytes_(static_cast<size_t>(group.size())) {}

  std::string name() const override { return fmt::format("staged over {}", group_.name()); }
  bool blocks() const override { return true; }

  void all_gather(const float* mine, float* all, std::span<const int64_t> counts, const Launch& at) override {
    const auto rank = static_cast<size_t>(group_.rank());
    int64_t before = 0, total = 0;
    for (size_t r = 0; r < counts.size(); ++r) {
      if (r < rank) before += counts[r];
      total += counts[r];
      bytes_[r] = static_cast<size_t>(counts[r]) * sizeof(float);
    }
    MILLRACE_CHECK(counts.size() == bytes_.size() &&
                   static_cast<size_t>(total) * sizeof(float) <= host_.bytes());
    if (total == 0) return;
    auto* const host = host_.as<std::byte>();
    const std::span<std::byte> own(host + static_cast<size_t>(before) * sizeof(float), bytes_[rank]);
    if (!own.empty()) {
      MILLRACE_CUDA_TRY(cudaMemcpyAsync(own.data(), mine, own.size(), cudaMemcpyDeviceToHost, at.stream));
    }
    MILLRACE_CUDA_TRY(cudaStreamSynchronize(at.stream));
    const std::span<std::byte> everything(host, static_cast<size_t>(total) * sizeof(float));
    group_.all_gather(own, everything, bytes_);
    MILLRACE_CUDA_TRY(
        cudaMemcpyAsync(all, everything.data(), everything.size(), cudaMemcpyHostToDevice, at.stream));
  }

 private:
  dist::Communicator& group_;
  PinnedBuffer host_;
  std::vector<size_t> bytes_;
};

// Why these ranks cannot use NCCL; empty: they can. Collective, the same on every rank.
std::string nccl_fault(dist::Communicator& group, const Device& device) {
  const NcclFound found = find_nccl();
  std::vector<std::string> versions = dist::all_gather_text(group, found.version);
  const std::vector<std::string> gpus = dist::all_gather_text(group, device.uuid_text());
  for (size_t r = 0; r < versions.size(); ++r) {
    if (versions[r].empty()) {
      return fmt::format("rank {} finds no NCCL{}", r,
                         static_cast<int>(r) == group.rank() ? fmt::format(": {}", found.fault) : "");
    }
  }
  if (std::set<std::string>(gpus.begin(), gpus.end()).size() < gpus.size()) return "ranks share a GPU";
  return {};
}

}  // namespace

LinkKind wanted_link() {
  const char* const variable = std::getenv("MILLRACE_RANK_LINK");
  const std::string_view wanted = variable == nullptr ? "" : variable;
  if (wanted.empty() || wanted == "auto") return LinkKind::kAuto;
  if (wanted == "staged") return LinkKind::kStaged;
  if (wanted == "nccl") return LinkKind::kNccl;
  throw_error(ErrorCode::kBadInput, "MILLRACE_RANK_LINK: found {}, expected auto, staged or nccl", wanted);
}

std::unique_ptr<DeviceLink> make_device_link(dist::Communicator& group, const Device& device, int64_t most,
                                             LinkKind kind) {
  if (kind != LinkKind::kStaged) {
    const std::string fault = nccl_fault(group, device);
    if (fault.empty()) return make_nccl_link(group, device);
    if (kind == LinkKind::kNccl) {
      throw_error(ErrorCode::kUnsupported, "MILLRACE_RANK_LINK: found nccl, but {}", fault);
    }
  }
  return std::make_unique<StagedLink>(group, most);
}

DeviceLinkSpeed measure(DeviceLink& link, dist::Communicator& group, const Device& device) {
  device.use();
  const Stream stream;
  const Launch at{device, stream.get()};
  const auto ranks = static_cast<size_t>(group.size());
  DeviceBuffer all(kMeasuredValues * sizeof(float), "a measurement"),
      mine(kMeasuredValues * sizeof(float), "a measurement");
  MILLRACE_CUDA_TRY(cudaMemsetAsync(mine.as<void>(), 0, mine.bytes(), stream.get()));
  const auto seconds = [&](int64_t each, int times) {
    const std::vector<int64_t> counts(ranks, each);
    link.all_gather(mine.as<float>(), all.as<float>(), counts, at);  // the first one connects
    stream.synchronize();
    group.barrier();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < times; ++i) link.all_gather(mine.as<float>(), all.as<float>(), counts, at);
    stream.synchronize();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / times;
  };
  DeviceLinkSpeed speed{.name = link.name(), .latency_s = seconds(1, 100)};
  const int64_t each = kMeasuredValues / group.size();
  speed.bytes_per_s = static_cast<double>(each * group.size()) * sizeof(float) / seconds(each, 10);
  return speed;
}

}  // namespace millrace::cuda
