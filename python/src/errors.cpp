#include "errors.h"

#include <new>

#include "cli/command.h"

namespace nb = nanobind;

namespace millrace::python {

const char* code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kBadInput:
      return "bad_input";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kIo:
      return "io";
    case ErrorCode::kNoMemory:
      return "no_memory";
    case ErrorCode::kDevice:
      return "device";
    case ErrorCode::kBusy:
      return "busy";
    case ErrorCode::kInternal:
      break;
  }
  return "internal";
}

ErrorCode code_of_status(int http_status) {
  if (http_status == 501) return ErrorCode::kUnsupported;
  if (http_status == 503 || http_status == 429) return ErrorCode::kBusy;
  return http_status < 500 ? ErrorCode::kBadInput : ErrorCode::kInternal;
}

namespace {

// millrace.errors.make_error(code, message), set as the exception of this thread.
void raise(ErrorCode code, const char* message) {
  try {
    const nb::object error =
        nb::module_::import_("millrace.errors").attr("make_error")(code_name(code), message);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  } catch (nb::python_error& failed) {
    failed.restore();
  }
}

void translate(const std::exception_ptr& thrown, void* /*payload*/) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    raise(error.code(), error.what());
  } catch (const server::ApiError& error) {
    raise(code_of_status(error.status), error.what());
  } catch (const cli::UsageError& error) {
    raise(ErrorCode::kBadInput, error.what());
  } catch (const std::bad_alloc&) {
    raise(ErrorCode::kNoMemory, "out of memory");
  }
}

}  // namespace

void check_signals() {
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

void bind_errors(nb::module_& /*m*/) { nb::register_exception_translator(translate); }

}  // namespace millrace::python
