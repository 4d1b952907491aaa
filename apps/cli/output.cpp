#include "output.h"

#include <fmt/core.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace millrace::cli {

void write_stdout(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(STDOUT_FILENO, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EPIPE) throw ClosedOutput{};
    if (n < 0) throw_error(ErrorCode::kIo, "standard output: cannot write: {}", std::strerror(errno));
    text.remove_prefix(static_cast<size_t>(n));
  }
}

void write_stderr(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(STDERR_FILENO, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return;
    text.remove_prefix(static_cast<size_t>(n));
  }
}

void write_json(const nlohmann::ordered_json& value) {
  // Names inside model files may be anything: what is not UTF-8 is replaced rather than refused.
  write_stdout(value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

bool stderr_is_terminal() { return ::isatty(STDERR_FILENO) == 1; }

std::string human_bytes(size_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string human_count(size_t count) {
  std::string digits = fmt::format("{}", count);
  for (size_t i = digits.size(); i > 3; i -= 3) digits.insert(i - 3, 1, ',');
  return digits;
}

void check_disk_space(const std::string& path, size_t bytes) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  struct statvfs status {};
  if (::statvfs(parent.empty() ? "." : parent.c_str(), &status) != 0) return;  // opening the file says why
  const uint64_t available = static_cast<uint64_t>(status.f_bavail) * status.f_frsize;
  if (available < bytes) {
    throw_error(ErrorCode::kIo, "{}: {} of disk space are free, expected {} for this file", path,
                human_bytes(available), human_bytes(bytes));
  }
}

}  // namespace millrace::cli
