// Positional and keyword arguments to parameters, with Python's complaints.
#include "jinja/bound_arguments.h"

#include <algorithm>

namespace millrace::jinja {

Bound::Bound(std::string_view function, const Arguments& arguments,
             std::initializer_list<std::string_view> parameters, size_t required)
    : values_(parameters.size(), nullptr) {
  if (arguments.positional.size() > parameters.size()) {
    fail("{}() takes at most {} arguments, {} given", function, parameters.size(),
         arguments.positional.size());
  }
  for (size_t i = 0; i < arguments.positional.size(); ++i) values_[i] = &arguments.positional[i];
  for (const auto& [name, value] : arguments.keyword) {
    auto it = std::find(parameters.begin(), parameters.end(), name);
    if (it == parameters.end()) fail("{}() got an unexpected keyword argument '{}'", function, name);
    const Value*& slot = values_[static_cast<size_t>(it - parameters.begin())];
    if (slot != nullptr) fail("{}() got multiple values for argument '{}'", function, name);
    slot = &value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (values_[i] == nullptr) fail("{}() missing the argument '{}'", function, *(parameters.begin() + i));
  }
}

}  // namespace millrace::jinja
