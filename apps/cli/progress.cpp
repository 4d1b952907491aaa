#include "progress.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

#include "interrupt.h"
#include "output.h"

namespace millrace::cli {
namespace {

using namespace std::chrono_literals;
// A bar that would be gone before it is read only flickers; in a log even ten seconds need no line.
constexpr std::chrono::milliseconds kFirstDraw = 300ms, kRedraw = 100ms, kLogLine = 30s;
constexpr int kBarCells = 28;

}  // namespace

Progress::Progress(std::string label, bool bytes)
    : label_(std::move(label)), bytes_(bytes), terminal_(stderr_is_terminal()) {
  next_ = start_ + (terminal_ ? kFirstDraw : kLogLine);
}

Progress::~Progress() { clear(); }

void Progress::clear() {
  if (drawn_) write_stderr("\r\x1b[K");
  drawn_ = false;
}

std::string Progress::line(size_t done, size_t total) const {
  const double part =
      total == 0 ? 1.0 : std::min(1.0, static_cast<double>(done) / static_cast<double>(total));
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  const double rate = static_cast<double>(done) / std::max(seconds, 1e-9);
  const double left = part > 0 ? seconds * (1.0 - part) / part : 0.0;
  std::string bar;
  for (int i = 0; i < kBarCells; ++i) bar += i < static_cast<int>(part * kBarCells + 0.5) ? "█" : "░";
  const std::string amount =
      bytes_ ? fmt::format("{} of {}, {}/s", human_bytes(done), human_bytes(total),
                           human_bytes(static_cast<size_t>(rate)))
             : fmt::format("{} of {}, {:.1f}/s", human_count(done), human_count(total), rate);
  return fmt::format("{} {} {:3.0f}%  {}, {:.0f} s left", label_, bar, 100.0 * part, amount, left);
}

void Progress::update(size_t done, size_t total) {
  throw_if_interrupted();
  if (Clock::now() < next_) return;
  next_ = Clock::now() + (terminal_ ? kRedraw : kLogLine);
  const std::string text = line(done, total);
  write_stderr(terminal_ ? fmt::format("\r{}\x1b[K", text) : fmt::format("{}\n", text));
  drawn_ = terminal_;
}

}  // namespace millrace::cli
