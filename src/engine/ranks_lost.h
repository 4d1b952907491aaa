// RanksLost: the group of ranks that a front process started has gone, or one of them has. Unlike other
// failures of a device it passes: the front starts the ranks anew (rank_front.h).
#pragma once

#include <exception>
#include <string>

#include "millrace/error.h"

namespace millrace {

class RanksLost : public Error {
 public:
  explicit RanksLost(const std::string& why) : Error(ErrorCode::kDevice, why) {}

  static bool is(const std::exception_ptr& error) noexcept {
    try {
      std::rethrow_exception(error);
    } catch (const RanksLost&) {
      return true;
    } catch (...) {
      return false;
    }
  }
};

}  // namespace millrace
