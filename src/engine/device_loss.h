// DeviceLoss: whether the device has failed. An Error{kDevice} is for good: it belongs to nobody's request,
// everybody's ends with it, and the inbox tells those who ask (Engine::failure). With a fallback everybody's
// begins anew on another device instead, once: recovered() (Engine::fallback). Ranks that are lost are not
// meant: they come again (rank_recovery.h).
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "engine/inbox.h"

namespace millrace {

class DeviceLoss {
 public:
  DeviceLoss(std::shared_ptr<Inbox> inbox, bool has_fallback)
      : inbox_(std::move(inbox)), has_fallback_(has_fallback) {}

  static bool is_of_device(const std::exception_ptr& error) noexcept;
  // Remembers the first failure of the device; any other error is none of its business.
  void note(const std::exception_ptr& error) noexcept;

  explicit operator bool() const { return error_ != nullptr; }
  const std::exception_ptr& error() const { return error_; }

  // Lost, and there is another device to go on with: nobody ends.
  bool may_recover() const { return error_ != nullptr && has_fallback_; }
  void recovered();                                     // they go on; the next loss is for good
  void not_recovered(const std::exception_ptr& error);  // there is none after all, for this reason

 private:
  const std::shared_ptr<Inbox> inbox_;
  bool has_fallback_;
  std::exception_ptr error_;
};

}  // namespace millrace
