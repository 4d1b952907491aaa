// MILLRACE_CHECK: an invariant of the program itself. Input never reaches it: bad input is an Error.
#pragma once

namespace millrace::detail {
[[noreturn]] void check_failed(const char* condition, const char* file, int line);
}

#define MILLRACE_CHECK(condition)                                       \
  do {                                                                  \
    if (!(condition)) [[unlikely]]                                      \
      ::millrace::detail::check_failed(#condition, __FILE__, __LINE__); \
  } while (false)
