// Error: what is thrown for bad files, bad configuration and device failure, and what an error event carries.
// A message is one line: what was found, what was expected, and where.
#pragma once

#include <stdexcept>
#include <string>

namespace millrace {

enum class ErrorCode {
  kBadInput,     // a file, a prompt or an option is wrong: the user can fix it
  kUnsupported,  // well-formed, but not something this build can do
  kIo,           // the operating system refused a read, a write or a mapping
  kNoMemory,     // does not fit
  kDevice,       // an accelerator failed
  kBusy,         // too many requests are waiting already, or the engine is shutting down
  kInternal,     // a fault of the program
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace millrace
