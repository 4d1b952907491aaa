// DeviceLoss: whether the device has failed. An Error{kDevice} is for good: it belongs to nobody's request,
// everybody's ends with it, and the inbox tells those who ask (Engine::failure). Ranks that are lost are not
// meant: they come again (rank_recovery.h).
#pragma once

#include <exception>
#include <memory>

#include "engine/inbox.h"

namespace millrace {

class DeviceLoss {
 public:
  explicit DeviceLoss(std::shared_ptr<Inbox> inbox) : inbox_(std::move(inbox)) {}

  static bool is_of_device(const std::exception_ptr& error) noexcept;
  // Remembers the first failure of the device; any other error is none of its business.
  void note(const std::exception_ptr& error) noexcept;

  explicit operator bool() const { return error_ != nullptr; }
  const std::exception_ptr& error() const { return error_; }

 private:
  const std::shared_ptr<Inbox> inbox_;
  std::exception_ptr error_;
};

}  // namespace millrace
