#include "download_progress.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "interrupt.h"
#include "output.h"

namespace millrace::cli {
namespace {

using namespace std::chrono_literals;
constexpr auto kRedrawBar = 100ms, kJsonEvery = 500ms, kLineEvery = 10000ms, kWindow = 5000ms;
constexpr int kCells = 24;

std::string duration_text(double seconds) {
  const auto s = static_cast<int64_t>(seconds + 0.5);
  return s >= 3600 ? fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)
                   : fmt::format("{}:{:02}", s / 60, s % 60);
}

const char* phase_name(hub::PullProgress::Phase phase) {
  switch (phase) {
    case hub::PullProgress::Phase::kWaiting:
      return "waiting";
    case hub::PullProgress::Phase::kChecking:
      return "checking";
    case hub::PullProgress::Phase::kDownloading:
      break;
  }
  return "downloading";
}

}  // namespace

DownloadProgress::DownloadProgress(bool json)
    : json_(json), terminal_(stderr_is_terminal() && !json), next_(Clock::now()) {
  if (!json_ && !terminal_) next_ += 2s;  // a download that is over by then needs no line of its own
}

DownloadProgress::~DownloadProgress() { clear(); }

void DownloadProgress::clear() {
  if (drawn_) write_stderr("\r\x1b[K");
  drawn_ = false;
}

double DownloadProgress::rate() const {
  if (samples_.size() < 2) return 0.0;
  const double seconds = std::chrono::duration<double>(samples_.back().time - samples_.front().time).count();
  const uint64_t bytes = samples_.back().done - std::min(samples_.back().done, samples_.front().done);
  return seconds > 0 ? static_cast<double>(bytes) / seconds : 0.0;
}

void DownloadProgress::update(const hub::PullProgress& at) {
  throw_if_interrupted();
  const Clock::time_point now = Clock::now();
  if (!started_) first_ = at.done;
  started_ = true;
  last_ = at.done;
  samples_.push_back({now, at.done});
  while (samples_.size() > 2 && now - samples_.front().time > kWindow) samples_.pop_front();
  if (now < next_) return;
  next_ = now + (terminal_ ? kRedrawBar : json_ ? kJsonEvery : kLineEvery);
  draw(at);
}

void DownloadProgress::draw(const hub::PullProgress& at) {
  const double speed = rate();
  const double left = speed > 0 ? static_cast<double>(at.total - std::min(at.done, at.total)) / speed : 0.0;
  if (json_) {
    const nlohmann::ordered_json line = {
        {"event", "progress"},       {"phase", phase_name(at.phase)}, {"file", at.file},
        {"file_done", at.file_done}, {"file_bytes", at.file_bytes},   {"done", at.done},
        {"total", at.total},         {"bytes_per_s", speed},          {"seconds_left", left}};
    write_stdout(line.dump() + "\n");
    return;
  }
  const double part =
      at.total == 0 ? 1.0 : std::min(1.0, static_cast<double>(at.done) / static_cast<double>(at.total));
  const std::string amount =
      fmt::format("{:3.0f}%  {} of {}", 100.0 * part, human_bytes(at.done), human_bytes(at.total));
  std::string state;
  if (at.phase == hub::PullProgress::Phase::kWaiting) {
    state = "waiting for another download of " + at.file;
  } else if (at.phase == hub::PullProgress::Phase::kChecking) {
    state = "checking " + at.file;
  } else if (speed > 0) {
    state = fmt::format("{}/s, {} left", human_bytes(static_cast<size_t>(speed)), duration_text(left));
  } else {
    state = "0 B/s";
  }
  if (!terminal_) {
    write_stderr(fmt::format("fetching {}: {}, {}\n", at.file, amount, state));
    return;
  }
  std::string bar;
  for (int i = 0; i < kCells; ++i) bar += i < static_cast<int>(part * kCells + 0.5) ? "█" : "░";
  write_stderr(fmt::format("\r{} {}, {}\x1b[K", bar, amount, state));
  drawn_ = true;
}

void DownloadProgress::finish() {
  clear();
  if (json_ || last_ <= first_) return;
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  write_stderr(fmt::format("fetched {} in {}, {}/s, hashes are right\n", human_bytes(last_ - first_),
                           duration_text(seconds),
                           human_bytes(static_cast<size_t>(static_cast<double>(last_ - first_) / seconds))));
}

}  // namespace millrace::cli
