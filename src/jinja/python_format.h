// Python's two ways to format, "%s" % x and "{}".format(x), and strftime.
#pragma once

#include <ctime>
#include <string>
#include <string_view>

#include "jinja/value.h"

namespace millrace::jinja {

std::string format_percent(const std::string& format, const Value& arguments);
std::string format_braces(std::string_view format, const Arguments& arguments);
std::string format_time(const std::string& format, std::time_t now);

}  // namespace millrace::jinja
