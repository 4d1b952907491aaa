#include "engine/failure_event.h"

#include <new>

namespace millrace {

Event failure_event(const std::exception_ptr& error) noexcept {
  Event event;
  event.kind = Event::Kind::kFailed;
  event.finish = FinishReason::kError;
  try {
    try {
      std::rethrow_exception(error);
    } catch (const Error& e) {
      event.code = e.code();
      event.error = e.what();
    } catch (const std::bad_alloc&) {
      event.code = ErrorCode::kNoMemory;
      event.error = "out of memory";  // short enough to need none
    } catch (const std::exception& e) {
      event.code = ErrorCode::kInternal;
      event.error = e.what();
    }
  } catch (...) {
    event.error = "out of memory";
  }
  return event;
}

}  // namespace millrace
