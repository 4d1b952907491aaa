// What a client is told of a failure.
#pragma once

#include <exception>

#include "millrace/request.h"

namespace millrace {

// The last event of a sample that failed. Needs no memory when there is none.
Event failure_event(const std::exception_ptr& error) noexcept;

}  // namespace millrace
