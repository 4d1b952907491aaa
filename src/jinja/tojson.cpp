// JSON in and out of templates: the render's variables become values, and tojson is Python's json.dumps.
#include "jinja/tojson.h"

#include <cmath>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "jinja/big_integer.h"
#include "jinja/bound_arguments.h"
#include "jinja/print.h"
#include "jinja/python_text.h"

namespace millrace::jinja {

using nlohmann::ordered_json;

namespace {

Value checked_text(const std::string& text) {
  if (!is_valid_utf8(text)) fail("a variable holds text that is not UTF-8");
  return Value::string(text);
}

}  // namespace

Value from_json(const ordered_json& json, int depth) {
  if (depth > static_cast<int>(Object::kMaxDepth))
    fail("the variables nest deeper than {} levels", Object::kMaxDepth);
  switch (json.type()) {
    case ordered_json::value_t::boolean:
      return Value::boolean(json.get<bool>());
    case ordered_json::value_t::number_integer:
      return Value::integer(json.get<int64_t>());
    case ordered_json::value_t::number_unsigned:
      return Value::whole(*BigInteger::parse(std::to_string(json.get<uint64_t>()), 10));
    case ordered_json::value_t::number_float:
      return Value::real(json.get<double>());
    case ordered_json::value_t::string:
      return checked_text(json.get_ref<const std::string&>());
    case ordered_json::value_t::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const auto& item : json) items.push_back(from_json(item, depth + 1));
      return Value::list(std::move(items));
    }
    case ordered_json::value_t::object: {
      auto dict = std::make_shared<DictObject>();
      for (const auto& [key, item] : json.items())
        dict->insert(checked_text(key), from_json(item, depth + 1));
      return Value::object(Kind::kDict, std::move(dict));
    }
    default:
      return Value::none();
  }
}

namespace {

class JsonDump {
 public:
  JsonDump(bool ascii, bool sort_keys, bool has_indent, std::string indent, std::string item, std::string key)
      : ascii_(ascii),
        sort_keys_(sort_keys),
        has_indent_(has_indent),
        indent_(std::move(indent)),
        item_separator_(std::move(item)),
        key_separator_(std::move(key)) {}

  std::string text;

  void write(const Value& value) {
    Budget::spend(1);
    if (text.size() > Budget::kMaxText) Budget::check_text(text.size());
    switch (value.kind()) {
      case Kind::kNone:
        text += "null";
        break;
      case Kind::kBool:
        text += value.as_int() != 0 ? "true" : "false";
        break;
      case Kind::kInt:
        text += std::to_string(value.as_int());
        break;
      case Kind::kBigInt:
        text += value.as_big().text();
        break;
      case Kind::kFloat:
        text += number(value.as_double());
        break;
      case Kind::kString:
        write_string(value.text());
        break;
      case Kind::kList:
      case Kind::kTuple:
        write_items(value.items());
        break;
      case Kind::kDict:
        write_dict(value.dict());
        break;
      default:
        fail("Object of type {} is not JSON serializable", type_name(value));
    }
  }

 private:
  static std::string number(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
    return repr_float(value);
  }

  void write_string(std::string_view s) {
    Budget::spend(s.size() / 16);
    text += '"';
    for (size_t i = 0; i < s.size();) {
      size_t begin = i;
      char32_t c = next_code_point(s, i);
      constexpr std::string_view kNames = "\"\\nrtbf", kValues = "\"\\\n\r\t\b\f";
      size_t special = c < 0x80 ? kValues.find(static_cast<char>(c)) : kValues.npos;
      if (special != kValues.npos)
        text += {'\\', kNames[special]};
      else if (c < 0x20 || (ascii_ && c >= 0x7f))
        escape(c);
      else
        text += s.substr(begin, i - begin);
    }
    text += '"';
  }

  void escape(char32_t c) {
    auto code = static_cast<uint32_t>(c);
    if (code < 0x10000) {
      text += fmt::format("\\u{:04x}", code);
    } else {
      code -= 0x10000;
      text += fmt::format("\\u{:04x}\\u{:04x}", 0xd800 + (code >> 10), 0xdc00 + (code & 0x3ff));
    }
  }

  void newline() {
    if (!has_indent_) return;
    text += '\n';
    Budget::check_text(text.size() + indent_.size() * level_);
    for (size_t i = 0; i < level_; ++i) text += indent_;
  }

  void write_items(const std::vector<Value>& items) {
    text += '[';
    ++level_;
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) text += item_separator_;
      newline();
      write(items[i]);
    }
    --level_;
    if (!items.empty()) newline();
    text += ']';
  }

  void write_key(const Value& key) {
    switch (key.kind()) {
      case Kind::kString:
        write_string(key.text());
        break;
      case Kind::kNone:
        write_string("null");
        break;
      case Kind::kBool:
        write_string(key.as_int() != 0 ? "true" : "false");
        break;
      case Kind::kInt:
        write_string(std::to_string(key.as_int()));
        break;
      case Kind::kBigInt:
        write_string(key.as_big().text());
        break;
      case Kind::kFloat:
        write_string(number(key.as_double()));
        break;
      default:
        fail("keys must be str, int, float, bool or None, not {}", type_name(key));
    }
  }

  void write_dict(const DictObject& dict) {
    std::vector<const std::pair<Value, Value>*> entries;
    for (const auto& entry : dict.entries) entries.push_back(&entry);
    if (sort_keys_) {
      std::stable_sort(entries.begin(), entries.end(),
                       [](const auto* a, const auto* b) { return less_than(a->first, b->first); });
    }
    text += '{';
    ++level_;
    for (size_t i = 0; i < entries.size(); ++i) {
      if (i > 0) text += item_separator_;
      newline();
      write_key(entries[i]->first);
      text += key_separator_;
      write(entries[i]->second);
    }
    --level_;
    if (!entries.empty()) newline();
    text += '}';
  }

  bool ascii_, sort_keys_, has_indent_;
  std::string indent_, item_separator_, key_separator_;
  size_t level_ = 0;
};

}  // namespace

Value filter_tojson(RenderState&, const Value& self, const Arguments& arguments) {
  Bound args("tojson", arguments, {"ensure_ascii", "indent", "separators", "sort_keys"});
  bool has_indent = args.given(1);
  std::string indent, item = has_indent ? "," : ", ", key = ": ";
  if (has_indent && args[1]->is_string())
    indent = args[1]->text();
  else if (has_indent)
    indent = std::string(static_cast<size_t>(std::clamp<int64_t>(to_index(*args[1]), 0, 1000)), ' ');
  if (args.given(2)) {
    std::vector<Value> separators = iterate(*args[2]);
    if (separators.size() != 2) fail("separators must be two strings");
    item = to_text(separators[0]);
    key = to_text(separators[1]);
  }
  JsonDump writer(args.flag(0), args.flag(3), has_indent, std::move(indent), std::move(item), std::move(key));
  writer.write(self);
  return Value::string(std::move(writer.text));
}

}  // namespace millrace::jinja
