// The parts of the module, each bound by a file of its own.
#pragma once

#include <nanobind/nanobind.h>

namespace millrace::python {

void bind_requests(nanobind::module_& m);  // Request, Event
void bind_model(nanobind::module_& m);     // Model, EventReader, ApiCall, options, names of models
void bind_serving(nanobind::module_& m);   // Serving

}  // namespace millrace::python
