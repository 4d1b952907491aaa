// millrace devices: the devices of this machine, and under mpirun the links between the ranks, measured.
#include "devices.h"

#include <fmt/core.h>

#include <algorithm>
#include <memory>

#include <nlohmann/json.hpp>

#include "backend/backend.h"
#include "base/error.h"
#include "base/utf8.h"
#include "dist/local_communicator.h"
#include "dist/mpi_communicator.h"
#include "dist/shares.h"
#include "engine/rank_group.h"
#include "output.h"

namespace millrace::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kDevicesFooter =
    "Examples:\n"
    "  millrace devices\n"
    "  mpirun -n 3 millrace devices          # and the links between three processes: latency and bandwidth";

constexpr size_t kMessage = size_t{4} << 20;  // long enough that its rate is the link's

// cuda:0, cuda:1, ... until there is none.
std::vector<std::string> descriptions() {
  std::vector<std::string> found = {make_backend("cpu", {})->description()};
  try {
    for (int gpu = 0;; ++gpu) found.push_back(make_backend(fmt::format("cuda:{}", gpu), {})->description());
  } catch (const Error& error) {
    if (found.size() == 1) found.push_back(fmt::format("no GPU: {}", error.what()));
  }
  return found;
}

struct Link {
  int a, b;
  dist::LinkSpeed speed;
};

// How GPUs of these ranks exchange what they made, measured; of one process what a rank of it would have.
// Collective; none where a rank has no GPU.
std::vector<DeviceLinkSpeed> device_links(dist::Communicator& group) {
  const HostPlace place = place_on_host(group);
  const dist::Shares shares = dist::Shares::even(group.rank(), group.size());
  std::unique_ptr<Backend> gpu;
  try {
    gpu = make_backend("cuda", {.group = &group,
                                .shares = &shares,
                                .local_rank = place.local_rank,
                                .local_ranks = place.local_ranks});
  } catch (const Error&) {  // descriptions() says why
  }
  for (const std::string& has : dist::all_gather_text(group, gpu == nullptr ? "" : "gpu")) {
    if (has.empty()) return {};
  }
  return gpu->measure_device_links();
}

void print(const std::vector<std::string>& devices, const std::vector<std::string>& hosts,
           const std::vector<Link>& links, const std::vector<DeviceLinkSpeed>& gpu_links, bool json) {
  if (json) {
    Json ranks = Json::array(), list = Json::array();
    for (size_t r = 0; r < hosts.size(); ++r) ranks.push_back({{"rank", r}, {"host", valid_utf8(hosts[r])}});
    for (const Link& link : links) {
      list.push_back({{"from", link.a},
                      {"to", link.b},
                      {"latency_s", link.speed.latency_s},
                      {"bytes_per_s", link.speed.bytes_per_s}});
    }
    Json gathers = Json::array();
    for (const DeviceLinkSpeed& link : gpu_links) {
      gathers.push_back(
          {{"name", link.name}, {"latency_s", link.latency_s}, {"bytes_per_s", link.bytes_per_s}});
    }
    write_json({{"devices", devices},
                {"mpi", dist::describe_mpi()},
                {"ranks", ranks},
                {"links", list},
                {"gpu_links", gathers}});
    return;
  }
  std::string out = "Devices\n";
  for (const std::string& device : devices) out += fmt::format("  {}\n", device);
  out += fmt::format("MPI\n  {}\n", dist::describe_mpi());
  for (size_t r = 0; r < hosts.size(); ++r) out += fmt::format("  rank {} on {}\n", r, valid_utf8(hosts[r]));
  for (const Link& link : links) {
    out += fmt::format("  link {} - {}: {:.1f} us, {:.2f} GB/s\n", link.a, link.b, 1e6 * link.speed.latency_s,
                       link.speed.bytes_per_s / 1e9);
  }
  if (!gpu_links.empty()) {
    out += fmt::format("Links of GPUs ({} rank{}: all of them gather everybody's part)\n",
                       std::max<size_t>(1, hosts.size()), hosts.size() > 1 ? "s" : "");
  }
  for (const DeviceLinkSpeed& link : gpu_links) {
    out += fmt::format("  {}: {:.1f} us, {:.2f} GB/s\n", link.name, 1e6 * link.latency_s,
                       link.bytes_per_s / 1e9);
  }
  write_stdout(out);
}

int devices(bool json) {
  if (!dist::started_by_mpi()) {
    print(descriptions(), {}, {}, device_links(*dist::make_local_group(1).front()), json);
    return 0;
  }
  const std::unique_ptr<dist::Communicator> group = dist::make_mpi_world();
  const std::vector<std::string> hosts = dist::all_gather_text(*group, host_name());
  std::vector<Link> links;
  for (int a = 0; a < group->size(); ++a) {
    for (int b = a + 1; b < group->size(); ++b)
      links.push_back({a, b, dist::measure_link(*group, a, b, kMessage)});
  }
  const std::vector<DeviceLinkSpeed> gpu_links = device_links(*group);
  if (group->rank() == 0) print(descriptions(), hosts, links, gpu_links, json);
  return 0;
}

}  // namespace

void add_devices(CommandLine& line) {
  Command command = line.add("devices", "what models can run on here, and the links between ranks");
  auto json = std::make_shared<bool>(false);
  command.flag("--json", *json, "one JSON object");
  command.footer(kDevicesFooter);
  command.runs([json] { return devices(*json); });
}

}  // namespace millrace::cli
