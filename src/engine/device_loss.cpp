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
  if (has_fallback_) return;
  Event event = failure_event(error);
  const std::lock_guard lock(inbox_->mutex);
  inbox_->failure = std::move(event.error);
}

void DeviceLoss::recovered() {
  const Event event = failure_event(error_);
  error_ = nullptr;
  has_fallback_ = false;
  const std::lock_guard lock(inbox_->mutex);
  inbox_->fallback = "using the CPU since the device failed: " + event.error;
}

void DeviceLoss::not_recovered(const std::exception_ptr& error) {
  const Event lost = failure_event(error_), why = failure_event(error);
  has_fallback_ = false;
  const std::string text = lost.error + "; the CPU cannot go on: " + why.error;
  error_ = std::make_exception_ptr(Error(ErrorCode::kDevice, text));
  const std::lock_guard lock(inbox_->mutex);
  inbox_->failure = text;
}

}  // namespace millrace
