#include "log.h"

#include <fmt/core.h>
#include <unistd.h>

#include <chrono>
#include <ctime>

#include "base/json_writer.h"
#include "base/utf8.h"

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
    JsonWriter json(line);
    json.begin_object().field("ts", timestamp()).field("level", level).field("msg", message);
    for (const Field& field : fields) {
      if (field.is_number) {
        json.key(field.name).raw(fmt::format("{:.10g}", field.number));
      } else if (!field.text.empty()) {
        json.field(field.name, field.text);
      }
    }
    json.end_object();
    line.push_back('\n');
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
