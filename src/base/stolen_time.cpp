#include "base/stolen_time.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace millrace {

StolenTime::StolenTime(const std::string& path) : file_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}

std::optional<double> StolenTime::share(double least) {
  // cpu  user nice system idle iowait irq softirq steal guest guest_nice: ticks of all processors
  constexpr size_t kFields = 8, kIdle = 3, kWaiting = 4, kStolen = 7;
  std::array<char, 256> text;
  const ssize_t bytes = file_.get() < 0 ? -1 : pread(file_.get(), text.data(), text.size() - 1, 0);
  if (bytes < 4 || std::memcmp(text.data(), "cpu ", 4) != 0) return std::nullopt;
  text[static_cast<size_t>(bytes)] = '\0';
  int64_t wanted = 0, stolen = 0;
  const char* at = text.data() + 4;
  for (size_t field = 0; field < kFields; ++field) {
    char* end = nullptr;
    const int64_t ticks = std::strtoll(at, &end, 10);
    if (end == at) return std::nullopt;
    at = end;
    if (field != kIdle && field != kWaiting) wanted += ticks;
    if (field == kStolen) stolen = ticks;
  }
  const int64_t wanted_before = std::exchange(wanted_, wanted),
                stolen_before = std::exchange(stolen_, stolen);
  const double some = std::max(1.0, least * static_cast<double>(sysconf(_SC_CLK_TCK)));
  if (wanted_before < 0 || static_cast<double>(wanted - wanted_before) < some) return std::nullopt;
  return static_cast<double>(std::max<int64_t>(0, stolen - stolen_before)) /
         static_cast<double>(wanted - wanted_before);
}

void Crew::observe(double stolen) {
  sum_ += stolen;
  if (++stretches_ < kSecond) return;
  const double mean = sum_ / stretches_;
  sum_ = 0.0;
  stretches_ = 0;
  decide(mean);
}

void Crew::decide(double stolen) {
  const bool came_back = std::exchange(came_back_, false);
  if (stolen > 0.5 / size_) {
    const int lost = came_back ? 1 : std::max(1, static_cast<int>(stolen * size_ / 2));
    size_ = std::max(max_size_ - max_size_ / 4, size_ - lost);
    if (came_back) wait_ = std::min(2 * wait_, kLongest);
    calm_ = 0;
    return;
  }
  if (came_back && size_ == max_size_) wait_ = 1;  // all of them, and it stayed calm
  if (size_ == max_size_ || ++calm_ < wait_) return;
  ++size_;
  calm_ = 0;
  came_back_ = true;
}

}  // namespace millrace
