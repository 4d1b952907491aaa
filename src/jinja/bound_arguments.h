// Arguments of a call as the called function sees them, bound to its parameters by Python's rules.
#pragma once

#include <initializer_list>
#include <string_view>
#include <vector>

#include "jinja/value.h"

namespace millrace::jinja {

// Python's binding of arguments to named parameters: values[i] is null where parameter i was not given.
class Bound {
 public:
  Bound(std::string_view function, const Arguments& arguments,
        std::initializer_list<std::string_view> parameters, size_t required = 0);
  const Value* operator[](size_t i) const { return values_[i]; }
  bool given(size_t i) const { return values_[i] != nullptr && !values_[i]->is_none(); }
  bool flag(size_t i) const { return values_[i] != nullptr && truthy(*values_[i]); }
  int64_t integer(size_t i, int64_t otherwise) const { return given(i) ? to_index(*values_[i]) : otherwise; }

 private:
  std::vector<const Value*> values_;
};

}  // namespace millrace::jinja
