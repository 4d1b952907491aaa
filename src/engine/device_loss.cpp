#include "engine/device_loss.h"

#include "engine/failure_event.h"
#include "engine/ranks_lost.h"

namespace millrace {

bool DeviceLoss::is_of_device(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const RanksLost&) {
    return false;
  } catch (const Error& e) {
    return e.code() == ErrorCode::kDevice;
  } catch (...) {
    return false;
  }
}

void DeviceLoss::note(const std::exception_ptr& error) noexcept {
  if (error_ || !is_of_device(error)) return;
  error_ = error;
  Event event = failure_event(error);
  const std::lock_guard lock(inbox_->mutex);
  inbox_->failure = std::move(event.error);
}

}  // namespace millrace
