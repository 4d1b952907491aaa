// throw_error: how an Error (millrace/error.h) is thrown. It is caught at four places only: the engine
// thread, the server handler, the command line's main and the language bindings.
#pragma once

#include <fmt/core.h>

#include <utility>

#include "millrace/error.h"

namespace millrace {

// throw_error(ErrorCode::kBadInput, "{}: magic is {:#x}, expected {:#x}", path, found, expected);
template <class... Args>
[[noreturn]] void throw_error(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace millrace
