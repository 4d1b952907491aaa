// _millrace: what the package millrace is made of. Nothing here is for users: python/millrace has the classes
// that they see, python/millrace/_millrace.pyi the types of these.
#include <nanobind/nanobind.h>

#include "errors.h"
#include "module_parts.h"

namespace nb = nanobind;

NB_MODULE(_millrace, m) {
  nb::set_leak_warnings(false);  // what a program holds at its end is nothing to complain about
  m.attr("__version__") = MILLRACE_VERSION;
  millrace::python::bind_errors(m);
  millrace::python::bind_requests(m);
  millrace::python::bind_model(m);
  millrace::python::bind_serving(m);
}
