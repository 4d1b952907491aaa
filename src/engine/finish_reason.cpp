// The names of FinishReason, as answers and logs have them.
#include "millrace/request.h"

namespace millrace {

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::kEndToken:
      return "stop";
    case FinishReason::kStopString:
      return "stop_string";
    case FinishReason::kMaxTokens:
      return "length";
    case FinishReason::kContext:
      return "context";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kDeadline:
      return "deadline";
    case FinishReason::kEmbedded:
      return "embedded";
    case FinishReason::kError:
      return "error";
  }
  return "unknown";
}

}  // namespace millrace
