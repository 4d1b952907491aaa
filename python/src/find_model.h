// From what a user writes for a model, a path, hf:owner/name:Q4_K_M or a short name, to the file to open.
// What is not on this machine is fetched (hub_by_python.cpp).
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace millrace::python {

struct FoundModel {
  std::string path;
  std::string name;  // what answers call it
};
// With the GIL held: signals are looked at while something is fetched, and `progress`, None or (done, total)
// -> None in bytes, is told. Throws Error{kBadInput} for a name that means nothing, with names that resemble
// it.
FoundModel find_model(const std::string& given, const nanobind::object& progress);

}  // namespace millrace::python
