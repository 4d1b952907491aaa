// What the engine throws, as Python's exceptions: millrace.errors has the classes.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "millrace/error.h"
#include "server/api_error.h"

namespace millrace::python {

// "bad_input", "unsupported", ...: what millrace.errors makes a class of.
const char* code_name(ErrorCode code);
ErrorCode code_of_status(int http_status);

void bind_errors(nanobind::module_& m);

// Throws KeyboardInterrupt, or what else a handler of a signal raised. With the GIL held.
void check_signals();

}  // namespace millrace::python
