// The server's log on standard error: a line per request and per event of its life, as text for people or as
// JSON (--log-json) for collectors.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace millrace::server {

class Log {
 public:
  struct Field {
    Field(std::string_view n, std::string_view v) : name(n), text(v) {}
    Field(std::string_view n, const char* v) : name(n), text(v) {}
    Field(std::string_view n, const std::string& v) : name(n), text(v) {}
    Field(std::string_view n, double v) : name(n), number(v), is_number(true) {}
    std::string_view name;
    std::string text = {};
    double number = 0;
    bool is_number = false;
  };
  explicit Log(bool json) : json_(json) {}

  // Fields with an empty text are left out. Each line is one write.
  void write(std::string_view level, std::string_view message, const std::vector<Field>& fields = {}) const;

 private:
  bool json_;
};

}  // namespace millrace::server
