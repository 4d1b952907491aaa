// The values a chat template computes with: Python's, as far as templates can tell. A Value is small and
// cheap to copy; what is behind it is shared and immutable, except namespaces (and the state of loops and
// iterators). Containers carry their nesting depth, so that printing, comparing and destroying them can
// recurse safely.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"

namespace millrace::jinja {

// What goes wrong inside a template; ChatTemplate turns it into an Error with the file and the line.
struct TemplateError : std::runtime_error {
  TemplateError(ErrorCode code_in, const std::string& message) : std::runtime_error(message), code(code_in) {}
  ErrorCode code;
};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw TemplateError(ErrorCode::kBadInput, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
[[noreturn]] void fail_unsupported(fmt::format_string<Args...> format, Args&&... args) {
  throw TemplateError(ErrorCode::kUnsupported, fmt::format(format, std::forward<Args>(args)...));
}

// What one render may use. Steps bound the time (one per node evaluated, per item and per 64 bytes touched);
// held bytes bound the memory alive at once. Both are far above what any conversation needs.
class Budget {
 public:
  static constexpr size_t kMaxSteps = 20'000'000;
  static constexpr size_t kMaxBytes = size_t{256} << 20;
  static constexpr size_t kMaxText = size_t{64} << 20;  // one string, and the output

  Budget() : previous_(active_) { active_ = this; }
  ~Budget() { active_ = previous_; }
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  static void spend(size_t steps);
  static size_t hold(size_t bytes);  // returns what release() must give back
  static void release(size_t bytes);
  // Before a string of `bytes` is built.
  static void check_text(size_t bytes);

 private:
  static thread_local Budget* active_;
  Budget* previous_;
  size_t steps_ = 0, bytes_ = 0;
};

enum class Kind : uint8_t {
  kUndefined,
  kNone,
  kBool,
  kInt,
  kBigInt,  // beyond 64 bits
  kFloat,
  kString,
  kList,
  kTuple,
  kRange,
  kView,      // dict_items, dict_keys, dict_values
  kIterator,  // a generator: can be iterated once
  kDict,
  kNamespace,
  kLoop,
  kMacro,
  kFunction,
};

// Behind a Value: knows the bytes it holds of the budget and how deep it nests.
struct Object {
  static constexpr uint32_t kMaxDepth = 100;
  Object(size_t bytes, uint32_t nesting);
  virtual ~Object() { Budget::release(held); }
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;
  size_t held;
  uint32_t depth;
};

class BigInteger;
struct StringObject;
struct SequenceObject;
struct DictObject;
struct NamespaceObject;
struct UndefinedObject;
struct FunctionObject;

class Value {
 public:
  Value() = default;  // undefined, without a reason
  static Value undefined(std::string reason);
  static Value none() { return Value(Kind::kNone); }
  static Value boolean(bool value);
  static Value integer(int64_t value);
  static Value whole(const BigInteger& value);  // kInt where 64 bits hold it
  static Value real(double value);
  static Value string(std::string text, bool markup = false);
  static Value list(std::vector<Value> items) { return sequence(Kind::kList, std::move(items)); }
  static Value tuple(std::vector<Value> items) { return sequence(Kind::kTuple, std::move(items)); }
  // kView and kIterator name their Python type in `label`; kRange its repr.
  static Value sequence(Kind kind, std::vector<Value> items, std::string label = {});
  static Value object(Kind kind, std::shared_ptr<Object> object);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  bool is_undefined() const { return kind_ == Kind::kUndefined; }
  bool is_none() const { return kind_ == Kind::kNone; }
  bool is_string() const { return kind_ == Kind::kString; }
  bool is_integral() const {
    return kind_ == Kind::kInt || kind_ == Kind::kBool;
  }  // bool is an int in Python
  bool is_whole() const { return is_integral() || kind_ == Kind::kBigInt; }
  bool is_number() const { return is_whole() || kind_ == Kind::kFloat; }
  bool is_sequence() const { return kind_ >= Kind::kList && kind_ <= Kind::kIterator; }
  bool is_markup() const;

  int64_t as_int() const { return integer_; }  // kInt, kBool
  BigInteger as_big() const;                   // kInt, kBool, kBigInt
  double as_double() const;                    // any number
  const std::string& text() const;             // kString
  int64_t text_length() const;                 // in code points
  const std::vector<Value>& items() const;     // kList ... kIterator
  SequenceObject& as_sequence() const;
  const DictObject& dict() const;
  NamespaceObject& as_namespace() const;
  const FunctionObject& function() const;
  const std::shared_ptr<Object>& object() const { return object_; }
  template <class T>
  T& as() const {
    return static_cast<T&>(*object_);
  }
  uint32_t depth() const { return object_ ? object_->depth : 0; }
  const std::string& undefined_reason() const;

 private:
  explicit Value(Kind kind) : kind_(kind) {}
  Kind kind_ = Kind::kUndefined;
  union {
    int64_t integer_ = 0;
    double real_;
  };
  std::shared_ptr<Object> object_;
};

uint32_t max_depth(const std::vector<Value>& items);

struct StringObject : Object {
  StringObject(std::string text_in, bool markup_in);
  std::string text;
  int64_t length;  // code points
  bool markup;     // Python's Markup: + escapes what is added
};

struct SequenceObject : Object {
  SequenceObject(std::vector<Value> items_in, std::string label_in);
  std::vector<Value> items;
  size_t position = 0;  // kIterator: the next item
  std::string label;
  int64_t start = 0, stop = 0, step = 1;  // kRange
};

struct UndefinedObject : Object {
  explicit UndefinedObject(std::string reason_in) : Object(0, 0), reason(std::move(reason_in)) {}
  std::string reason;
};

// Insertion-ordered, keys compared as Python does (1 == 1.0 == True).
struct DictObject : Object {
  DictObject() : Object(sizeof(DictObject), 1) {}
  // Rejects unhashable keys; a key already there keeps its place.
  void insert(Value key, Value value);
  const Value* find(std::string_view key) const;
  const Value* find(const Value& key) const;
  std::vector<std::pair<Value, Value>> entries;

 private:
  ptrdiff_t position(const Value& key) const;
  std::unordered_map<std::string_view, size_t> by_text_;  // views into the keys of entries
};

struct NamespaceObject : Object {
  NamespaceObject() : Object(sizeof(NamespaceObject), 1) {}
  const Value* find(std::string_view name) const;
  void set(std::string_view name, Value value);
  std::vector<std::pair<std::string, Value>> attributes;
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> keyword;
};

struct RenderState;
// Filters, tests, methods and global functions: `self` is the input, or the object of a method.
using Native = Value (*)(RenderState&, const Value& self, const Arguments&);

struct FunctionObject : Object {
  FunctionObject(std::string name_in, Native native_in, Value self_in)
      : Object(sizeof(FunctionObject), self_in.depth() + 1),
        name(std::move(name_in)),
        native(native_in),
        self(std::move(self_in)) {}
  std::string name;
  Native native;
  Value self;
};

std::string type_name(const Value& value);  // Python's: "str", "NoneType", ...
bool truthy(const Value& value);
bool equal(const Value& a, const Value& b);
// a < b as Python orders them; fails on what has no order. `op` is for the message.
bool less_than(const Value& a, const Value& b, const char* op = "<");
bool contains(const Value& container, const Value& item);
// What `for` sees; fails on what cannot be iterated. Iterating uses an iterator up.
std::vector<Value> iterate(const Value& value);
bool is_iterable(const Value& value);
// len(); nothing where Python raises a TypeError.
std::optional<int64_t> length_of(const Value& value);
// A bool or int argument; fails with Python's complaint otherwise.
int64_t to_index(const Value& value);
[[noreturn]] void fail_undefined(const Value& value);

}  // namespace millrace::jinja
