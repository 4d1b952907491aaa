// Values: construction, budget, truth, equality, order, iteration. See value.h.
#include "jinja/value.h"

#include <algorithm>
#include <cmath>
#include <compare>

#include "base/work_budget.h"
#include "jinja/big_integer.h"
#include "jinja/python_text.h"

namespace millrace::jinja {

thread_local Budget* Budget::active_ = nullptr;

void Budget::spend(size_t steps) {
  spend_work(4 * steps);
  if (active_ == nullptr) return;
  active_->steps_ += steps;
  if (active_->steps_ > kMaxSteps) fail("the template runs for more than {} steps", kMaxSteps);
}

size_t Budget::hold(size_t bytes) {
  if (active_ == nullptr) return 0;
  spend(1 + bytes / 64);
  if (active_->bytes_ + bytes > kMaxBytes) fail("the template needs more than {} bytes of memory", kMaxBytes);
  active_->bytes_ += bytes;
  return bytes;
}

void Budget::release(size_t bytes) {
  if (active_ != nullptr) active_->bytes_ -= std::min(bytes, active_->bytes_);
}

void Budget::check_text(size_t bytes) {
  spend(1 + bytes / 64);
  if (bytes > kMaxText) fail("the template builds a text of more than {} bytes", kMaxText);
}

Object::Object(size_t bytes, uint32_t nesting) : held(0), depth(nesting) {
  if (nesting > kMaxDepth) fail("values nest deeper than {} levels", kMaxDepth);
  held = Budget::hold(bytes);
}

uint32_t max_depth(const std::vector<Value>& items) {
  uint32_t depth = 0;
  for (const Value& item : items) depth = std::max(depth, item.depth());
  return depth;
}

StringObject::StringObject(std::string text_in, bool markup_in)
    : Object(text_in.size() + sizeof(StringObject), 0), text(std::move(text_in)), markup(markup_in) {
  length = count_code_points(text);
}

SequenceObject::SequenceObject(std::vector<Value> items_in, std::string label_in)
    : Object(items_in.size() * sizeof(Value) + sizeof(SequenceObject), max_depth(items_in) + 1),
      items(std::move(items_in)),
      label(std::move(label_in)) {}

Value Value::object(Kind kind, std::shared_ptr<Object> object) {
  Value v(kind);
  v.object_ = std::move(object);
  return v;
}

Value Value::undefined(std::string reason) {
  return object(Kind::kUndefined, std::make_shared<UndefinedObject>(std::move(reason)));
}

Value Value::boolean(bool value) {
  Value v(Kind::kBool);
  v.integer_ = value ? 1 : 0;
  return v;
}

Value Value::integer(int64_t value) {
  Value v(Kind::kInt);
  v.integer_ = value;
  return v;
}

namespace {

struct BigObject : Object {
  explicit BigObject(const BigInteger& value_in)
      : Object(sizeof(BigObject) + value_in.num_bytes(), 0), value(value_in) {}
  BigInteger value;
};

}  // namespace

Value Value::whole(const BigInteger& value) {
  if (const std::optional<int64_t> small = value.as_int()) return integer(*small);
  return object(Kind::kBigInt, std::make_shared<BigObject>(value));
}

BigInteger Value::as_big() const {
  return kind_ == Kind::kBigInt ? as<BigObject>().value : BigInteger(integer_);
}

double Value::as_double() const {
  if (kind_ == Kind::kBigInt) return as<BigObject>().value.as_double();
  return kind_ == Kind::kFloat ? real_ : static_cast<double>(integer_);
}

Value Value::real(double value) {
  Value v(Kind::kFloat);
  v.real_ = value;
  return v;
}

Value Value::string(std::string text, bool markup) {
  Budget::check_text(text.size());
  return object(Kind::kString, std::make_shared<StringObject>(std::move(text), markup));
}

Value Value::sequence(Kind kind, std::vector<Value> items, std::string label) {
  return object(kind, std::make_shared<SequenceObject>(std::move(items), std::move(label)));
}

bool Value::is_markup() const { return is_string() && as<StringObject>().markup; }
const std::string& Value::text() const { return as<StringObject>().text; }
int64_t Value::text_length() const { return as<StringObject>().length; }
const std::vector<Value>& Value::items() const { return as<SequenceObject>().items; }
SequenceObject& Value::as_sequence() const { return as<SequenceObject>(); }
const DictObject& Value::dict() const { return as<DictObject>(); }
NamespaceObject& Value::as_namespace() const { return as<NamespaceObject>(); }
const FunctionObject& Value::function() const { return as<FunctionObject>(); }

const std::string& Value::undefined_reason() const {
  static const std::string kPlain = "the value is undefined";
  return object_ ? as<UndefinedObject>().reason : kPlain;
}

void fail_undefined(const Value& value) { fail("{}", value.undefined_reason()); }

namespace {

bool is_hashable(const Value& key) {
  if (key.is(Kind::kTuple)) return std::all_of(key.items().begin(), key.items().end(), is_hashable);
  return !key.is(Kind::kList) && !key.is(Kind::kDict) && !key.is(Kind::kView);
}

// Dicts shorter than this are searched in order.
constexpr size_t kIndexFrom = 12;

}  // namespace

ptrdiff_t DictObject::position(const Value& key) const {
  if (key.is_string() && !by_text_.empty()) {
    auto it = by_text_.find(key.text());
    return it == by_text_.end() ? -1 : static_cast<ptrdiff_t>(it->second);
  }
  Budget::spend(1 + entries.size() / 8);
  for (size_t i = 0; i < entries.size(); ++i) {
    if (equal(entries[i].first, key)) return static_cast<ptrdiff_t>(i);
  }
  return -1;
}

const Value* DictObject::find(const Value& key) const {
  if (!is_hashable(key)) fail("unhashable type: '{}'", type_name(key));
  ptrdiff_t i = position(key);
  return i < 0 ? nullptr : &entries[static_cast<size_t>(i)].second;
}

const Value* DictObject::find(std::string_view key) const {
  if (!by_text_.empty()) {
    auto it = by_text_.find(key);
    return it == by_text_.end() ? nullptr : &entries[it->second].second;
  }
  for (const auto& [k, v] : entries) {
    if (k.is_string() && k.text() == key) return &v;
  }
  return nullptr;
}

void DictObject::insert(Value key, Value value) {
  if (!is_hashable(key)) fail("unhashable type: '{}'", type_name(key));
  depth = std::max({depth, key.depth() + 1, value.depth() + 1});
  if (depth > kMaxDepth) fail("values nest deeper than {} levels", kMaxDepth);
  if (ptrdiff_t i = position(key); i >= 0) {
    entries[static_cast<size_t>(i)].second = std::move(value);
    return;
  }
  held += Budget::hold(sizeof(std::pair<Value, Value>) + 32);
  entries.emplace_back(std::move(key), std::move(value));
  if (!by_text_.empty()) {
    if (entries.back().first.is_string()) by_text_.emplace(entries.back().first.text(), entries.size() - 1);
  } else if (entries.size() >= kIndexFrom) {
    for (size_t i = 0; i < entries.size(); ++i) {
      if (entries[i].first.is_string()) by_text_.emplace(entries[i].first.text(), i);
    }
  }
}

const Value* NamespaceObject::find(std::string_view name) const {
  for (const auto& [key, value] : attributes) {
    if (key == name) return &value;
  }
  return nullptr;
}

void NamespaceObject::set(std::string_view name, Value value) {
  Budget::spend(1 + attributes.size() / 8);
  for (auto& [key, old] : attributes) {
    if (key == name) {
      old = std::move(value);
      return;
    }
  }
  held += Budget::hold(sizeof(attributes[0]) + name.size());
  attributes.emplace_back(std::string(name), std::move(value));
}

std::string type_name(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
      return "Undefined";
    case Kind::kNone:
      return "NoneType";
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
    case Kind::kBigInt:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kString:
      return value.is_markup() ? "Markup" : "str";
    case Kind::kList:
      return "list";
    case Kind::kTuple:
      return "tuple";
    case Kind::kRange:
      return "range";
    case Kind::kView:
    case Kind::kIterator:
      return value.as_sequence().label;
    case Kind::kDict:
      return "dict";
    case Kind::kNamespace:
      return "Namespace";
    case Kind::kLoop:
      return "LoopContext";
    case Kind::kMacro:
      return "Macro";
    case Kind::kFunction:
      return "function";
  }
  return "object";
}

bool truthy(const Value& value) {
  switch (value.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return false;
    case Kind::kBool:
    case Kind::kInt:
      return value.as_int() != 0;
    case Kind::kFloat:
      return value.as_double() != 0;
    case Kind::kString:
      return !value.text().empty();
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kRange:
    case Kind::kView:
      return !value.items().empty();
    case Kind::kDict:
      return !value.dict().entries.empty();
    default:
      return true;
  }
}

namespace {

bool equal_items(const std::vector<Value>& a, const std::vector<Value>& b) {
  if (a.size() != b.size()) return false;
  Budget::spend(1 + a.size());
  return std::equal(a.begin(), a.end(), b.begin(), equal);
}

bool equal_dicts(const DictObject& a, const DictObject& b) {
  if (a.entries.size() != b.entries.size()) return false;
  Budget::spend(1 + a.entries.size());
  for (const auto& [key, value] : a.entries) {
    const Value* other = b.find(key);
    if (other == nullptr || !equal(value, *other)) return false;
  }
  return true;
}

int order_of(std::strong_ordering order) { return std::is_lt(order) ? -1 : std::is_gt(order) ? 1 : 0; }

// A whole number and a finite one, exactly.
int compare_exactly(const BigInteger& a, double b) {
  if (const int order = order_of(a <=> BigInteger::truncated(b)); order != 0) return order;
  const double fraction = b - std::trunc(b);
  return fraction > 0 ? -1 : fraction < 0 ? 1 : 0;
}

int compare_numbers(const Value& a, const Value& b) {
  if (a.is(Kind::kBigInt) || b.is(Kind::kBigInt)) {
    if (a.is_whole() && b.is_whole()) return order_of(a.as_big() <=> b.as_big());
    const double real = a.is_whole() ? b.as_double() : a.as_double();
    if (std::isfinite(real))
      return a.is_whole() ? compare_exactly(a.as_big(), real) : -compare_exactly(b.as_big(), real);
    if (std::isnan(real)) return 2;
    return (real > 0) == a.is_whole() ? -1 : 1;
  }
  if (a.is_integral() && b.is_integral()) return a.as_int() < b.as_int() ? -1 : a.as_int() > b.as_int();
  double x = a.as_double(), y = b.as_double();
  return x < y ? -1 : x > y ? 1 : x == y ? 0 : 2;  // 2: not a number
}

}  // namespace

bool equal(const Value& a, const Value& b) {
  Budget::spend(1);
  if (a.is_number() && b.is_number()) return compare_numbers(a, b) == 0;
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kString:
      Budget::spend(std::min(a.text().size(), b.text().size()) / 64);
      return a.text() == b.text();
    case Kind::kList:
    case Kind::kTuple:
    case Kind::kRange:
      return equal_items(a.items(), b.items());
    case Kind::kView:
      return a.object() == b.object() || (type_name(a) == type_name(b) && equal_items(a.items(), b.items()));
    case Kind::kDict:
      return a.object() == b.object() || equal_dicts(a.dict(), b.dict());
    default:
      return a.object() == b.object();
  }
}

bool less_than(const Value& a, const Value& b, const char* op) {
  Budget::spend(1);
  if (a.is_undefined()) fail_undefined(a);
  if (b.is_undefined()) fail_undefined(b);
  bool or_equal = op[1] == '=';
  if (a.is_number() && b.is_number()) {
    int order = compare_numbers(a, b);
    return order == -1 || (or_equal && order == 0);
  }
  if (a.is_string() && b.is_string()) {  // the order of UTF-8 bytes is the order of code points
    Budget::spend(std::min(a.text().size(), b.text().size()) / 64);
    return or_equal ? a.text() <= b.text() : a.text() < b.text();
  }
  if (a.kind() == b.kind() && (a.is(Kind::kList) || a.is(Kind::kTuple))) {
    const auto &x = a.items(), &y = b.items();
    for (size_t i = 0; i < x.size() && i < y.size(); ++i) {
      if (!equal(x[i], y[i])) return less_than(x[i], y[i], op);
    }
    return or_equal ? x.size() <= y.size() : x.size() < y.size();
  }
  fail("'{}' not supported between instances of '{}' and '{}'", op, type_name(a), type_name(b));
}

bool contains(const Value& container, const Value& item) {
  if (container.is_string()) {
    if (!item.is_string()) fail("'in <string>' requires string as left operand, not {}", type_name(item));
    Budget::spend(1 + container.text().size() / 64);
    return container.text().find(item.text()) != std::string::npos;
  }
  if (container.is(Kind::kDict)) return container.dict().find(item) != nullptr;
  if (!is_iterable(container)) fail("argument of type '{}' is not iterable", type_name(container));
  for (const Value& v : iterate(container)) {
    if (equal(v, item)) return true;
  }
  return false;
}

bool is_iterable(const Value& value) {
  return value.is_undefined() || value.is_string() || value.is_sequence() || value.is(Kind::kDict) ||
         value.is(Kind::kLoop);
}

std::vector<Value> iterate(const Value& value) {
  std::vector<Value> items;
  if (value.is(Kind::kIterator)) {
    SequenceObject& source = value.as_sequence();
    auto from = source.items.begin() + static_cast<ptrdiff_t>(source.position);
    items.assign(from, source.items.end());
    source.position = source.items.size();
  } else if (value.is_sequence()) {
    Budget::spend(value.items().size());
    items = value.items();
  } else if (value.is_string()) {
    Budget::spend(static_cast<size_t>(value.text_length()));
    for (std::string_view c : split_code_points(value.text())) items.push_back(Value::string(std::string(c)));
  } else if (value.is(Kind::kDict)) {
    Budget::spend(value.dict().entries.size());
    for (const auto& entry : value.dict().entries) items.push_back(entry.first);
  } else if (value.is(Kind::kLoop)) {
    fail_unsupported("iterating over the loop variable itself");
  } else if (!value.is_undefined()) {
    fail("'{}' object is not iterable", type_name(value));
  }
  return items;
}

std::optional<int64_t> length_of(const Value& value) {
  if (value.is_undefined()) return 0;
  if (value.is_string()) return value.text_length();
  if (value.is(Kind::kDict)) return static_cast<int64_t>(value.dict().entries.size());
  if (value.is_sequence() && !value.is(Kind::kIterator)) return static_cast<int64_t>(value.items().size());
  return std::nullopt;
}

int64_t to_index(const Value& value) {
  if (value.is_undefined()) fail_undefined(value);
  if (value.is(Kind::kBigInt)) fail("cannot fit 'int' into an index-sized integer");
  if (!value.is_integral()) fail("'{}' object cannot be interpreted as an integer", type_name(value));
  return value.as_int();
}

}  // namespace millrace::jinja
