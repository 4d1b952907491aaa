// Python's two ways to format, "%s" % x and "{}".format(x), and strftime.
#pragma once

#include <ctime>
#include <string>
#include <string_view>

#include "jinja/value.h"

namespace millrace::jinja {

// `format`: a string; what goes into markup is escaped, and the result is markup.
Value format_percent(const Value& format, const Value& arguments);
Value format_braces(const Value& format, const Arguments& arguments);
std::string format_time(const std::string& format, std::time_t now);

}  // namespace millrace::jinja
