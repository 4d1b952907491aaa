// Error: what is thrown for bad files, bad configuration and device failure. It is caught at four places
// only: the engine thread, the server handler, the command line's main and the language bindings.
// A message is one line: what was found, what was expected, and where.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace millrace {

enum class ErrorCode {
  kBadInput,     // a file, a prompt or an option is wrong: the user can fix it
  kUnsupported,  // well-formed, but not something this build can do
  kIo,           // the operating system refused a read, a write or a mapping
  kNoMemory,     // does not fit
  kDevice,       // an accelerator failed
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

// throw_error(ErrorCode::kBadInput, "{}: magic is {:#x}, expected {:#x}", path, found, expected);
template <class... Args>
[[noreturn]] void throw_error(ErrorCode code, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(code, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace millrace
