#include "log.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <ctime>

#include "base/utf8.h"
#include "json_text.h"

namespace millrace::server {
namespace {

std::string timestamp() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t seconds = std::chrono::system_clock::to_time_t(now);
  std::tm utc{};
  ::gmtime_r(&seconds, &utc);
  const auto since_epoch = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch());
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", utc.tm_year + 1900, utc.tm_mon + 1,
                     utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, since_epoch.count() % 1000);
}

}  // namespace

void Log::write(std::string_view level, std::string_view message, const std::vector<Field>& fields) const {
  std::string line;
  if (json_) {
    line = fmt::format(R"({{"ts":"{}","level":"{}","msg":)", timestamp(), level);
    append_json(line, valid_utf8(message));
    for (const Field& field : fields) {
      if (!field.is_number && field.text.empty()) continue;
      line.push_back(',');
      append_json(line, field.name);
      line.push_back(':');
      if (field.is_number) {
        line += fmt::format("{:.10g}", field.number);
      } else {
        append_json(line, valid_utf8(field.text));
      }
    }
    line += "}\n";
  } else {
    line = fmt::format("{} {:<5} {}", timestamp(), level, valid_utf8(message));
    for (const Field& field : fields) {
      if (field.is_number) {
        line += fmt::format(" {}={:.6g}", field.name, field.number);
      } else if (!field.text.empty()) {
        line += fmt::format(" {}={}", field.name, valid_utf8(field.text));
      }
    }
    for (char& c : line) {
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
    }
    line.push_back('\n');
  }
  // Nowhere to report a failure to.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace millrace::server
