// The tests that stand behind `is`, and the operators that select() and its like take by name.
#include "jinja/is_tests.h"

#include <cstdint>

#include "jinja/bound_arguments.h"
#include "jinja/filters.h"
#include "jinja/native_table.h"
#include "jinja/operators.h"
#include "jinja/print.h"
#include "jinja/render_state.h"
#include "jinja/text_methods.h"

namespace millrace::jinja {

namespace {

// Tests. kTest<check> turns a predicate on one value into a Native.
template <bool (*kCheck)(const Value&)>
Value test(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("the test", arguments, {});
  return Value::boolean(kCheck(self));
}

template <bool (*kCheck)(const Value&, const Value&)>
Value test_with(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("the test", arguments, {"other"}, 1);
  return Value::boolean(kCheck(self, *args[0]));
}

bool is_defined(const Value& v) { return !v.is_undefined(); }
bool is_not_defined(const Value& v) { return v.is_undefined(); }
bool is_none(const Value& v) { return v.is_none(); }
bool is_bool(const Value& v) { return v.is(Kind::kBool); }
bool is_true(const Value& v) { return v.is(Kind::kBool) && v.as_int() != 0; }
bool is_false(const Value& v) { return v.is(Kind::kBool) && v.as_int() == 0; }
bool is_integer(const Value& v) { return v.is(Kind::kInt) || v.is(Kind::kBigInt); }
bool is_float(const Value& v) { return v.is(Kind::kFloat); }
bool is_number(const Value& v) { return v.is_number(); }
bool is_text(const Value& v) { return v.is_string(); }
bool is_mapping(const Value& v) { return v.is(Kind::kDict); }
bool is_callable(const Value& v) {
  return v.is(Kind::kFunction) || v.is(Kind::kMacro) || v.is(Kind::kLoop) || v.is_undefined();
}
bool is_escaped(const Value& v) { return v.is_markup(); }
// Anything with a length and subscripts; Undefined has both.
bool is_sequence(const Value& v) { return length_of(v).has_value() && !v.is(Kind::kView); }
bool is_filter_name(const Value& v) { return v.is_string() && find_filter(v.text()) != nullptr; }
bool is_test_name(const Value& v) { return v.is_string() && find_test(v.text()) != nullptr; }
bool is_upper_text(const Value& v) {
  RenderState state;
  return truthy(find_text_method("isupper")(state, Value::string(to_text(v)), {}));
}
bool is_lower_text(const Value& v) {
  RenderState state;
  return truthy(find_text_method("islower")(state, Value::string(to_text(v)), {}));
}
bool leaves(const Value& v, int64_t divisor, int64_t rest) {
  return equal(binary_operator('%', v, Value::integer(divisor)), Value::integer(rest));
}
bool is_odd(const Value& v) { return leaves(v, 2, 1); }
bool is_even(const Value& v) { return leaves(v, 2, 0); }
bool is_divisible(const Value& v, const Value& by) {
  return equal(binary_operator('%', v, by), Value::integer(0));
}
bool is_equal(const Value& a, const Value& b) { return equal(a, b); }
bool is_unequal(const Value& a, const Value& b) { return !equal(a, b); }
bool is_less(const Value& a, const Value& b) { return less_than(a, b, "<"); }
bool is_less_equal(const Value& a, const Value& b) { return less_than(a, b, "<="); }
bool is_greater(const Value& a, const Value& b) { return less_than(b, a, ">"); }
bool is_greater_equal(const Value& a, const Value& b) { return less_than(b, a, ">="); }
bool is_in(const Value& a, const Value& b) { return contains(b, a); }
bool is_same(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  if (a.object() != nullptr || b.object() != nullptr) return a.object() == b.object();
  return a.is(Kind::kFloat) ? a.as_double() == b.as_double()
                            : a.is_undefined() || a.is_none() || a.as_int() == b.as_int();
}

}  // namespace

Native find_test(std::string_view name) {
  static const NativeTable kTests = {{"defined", test<is_defined>},
                                     {"undefined", test<is_not_defined>},
                                     {"none", test<is_none>},
                                     {"boolean", test<is_bool>},
                                     {"true", test<is_true>},
                                     {"false", test<is_false>},
                                     {"integer", test<is_integer>},
                                     {"float", test<is_float>},
                                     {"number", test<is_number>},
                                     {"string", test<is_text>},
                                     {"mapping", test<is_mapping>},
                                     {"iterable", test<is_iterable>},
                                     {"sequence", test<is_sequence>},
                                     {"callable", test<is_callable>},
                                     {"escaped", test<is_escaped>},
                                     {"upper", test<is_upper_text>},
                                     {"lower", test<is_lower_text>},
                                     {"odd", test<is_odd>},
                                     {"even", test<is_even>},
                                     {"filter", test<is_filter_name>},
                                     {"test", test<is_test_name>},
                                     {"divisibleby", test_with<is_divisible>},
                                     {"==", test_with<is_equal>},
                                     {"eq", test_with<is_equal>},
                                     {"equalto", test_with<is_equal>},
                                     {"!=", test_with<is_unequal>},
                                     {"ne", test_with<is_unequal>},
                                     {"<", test_with<is_less>},
                                     {"lt", test_with<is_less>},
                                     {"lessthan", test_with<is_less>},
                                     {"<=", test_with<is_less_equal>},
                                     {"le", test_with<is_less_equal>},
                                     {">", test_with<is_greater>},
                                     {"gt", test_with<is_greater>},
                                     {"greaterthan", test_with<is_greater>},
                                     {">=", test_with<is_greater_equal>},
                                     {"ge", test_with<is_greater_equal>},
                                     {"in", test_with<is_in>},
                                     {"sameas", test_with<is_same>}};
  return look_up(kTests, name);
}

}  // namespace millrace::jinja
