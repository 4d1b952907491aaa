// The tree is built from events. Members are appended as they come; equal keys are looked for
// once, when an object is complete.
#include "base/json_tree.h"

#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "base/json_reader.h"
#include "base/work_budget.h"

namespace millrace {
namespace {

using Json = nlohmann::ordered_json;
using Members = Json::object_t::Container;  // what an ordered object is underneath: a vector

constexpr size_t kMaxShown = 300;  // of a text in a message

// For messages: the beginning, and never half a character.
std::string shown(std::string_view text, size_t max = kMaxShown) {
  if (text.size() <= max) return std::string(text);
  while (max > 0 && (static_cast<unsigned char>(text[max]) & 0xc0) == 0x80) --max;
  return std::string(text.substr(0, max)) + "...";
}

// nlohmann's json_sax: false ends the parsing.
class TreeBuilder {
 public:
  explicit TreeBuilder(const JsonLimits& limits) : limits_(limits) {}

  bool null() { return add(nullptr) != nullptr; }
  bool boolean(bool value) { return add(value) != nullptr; }
  bool number_integer(Json::number_integer_t value) { return add(value) != nullptr; }
  bool number_unsigned(Json::number_unsigned_t value) { return add(value) != nullptr; }
  bool number_float(Json::number_float_t value, const std::string&) { return add(value) != nullptr; }
  bool string(std::string& value) {
    spend_work(value.size() / 8);
    return add(std::move(value)) != nullptr;
  }
  bool binary(Json::binary_t&) { return false; }  // there is none in text
  bool start_object(size_t) { return open(Json::object()); }
  bool start_array(size_t) { return open(Json::array()); }
  bool end_array() {
    stack_.pop_back();
    return true;
  }

  bool key(std::string& key) {
    auto& members = stack_.back()->get_ref<Json::object_t&>();
    if (members.size() >= limits_.keys) refuse(fmt::format("has more than {} keys", limits_.keys));
    if (key.size() > limits_.key_bytes) {
      refuse(fmt::format("has a key of {} bytes, expected at most {}", key.size(), limits_.key_bytes));
    }
    spend_work(1 + key.size() / 8);
    members.emplace_back(std::move(key), nullptr);
    return true;
  }
  bool end_object() {
    check_keys();
    stack_.pop_back();
    return true;
  }

  bool parse_error(size_t byte, const std::string&, const nlohmann::detail::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: ...": the front is the library's.
    std::string_view what = error.what();
    const size_t end = what.find("] ");
    if (end != std::string_view::npos) what.remove_prefix(end + 2);
    throw JsonTextError(shown(what), false, byte);
  }

  Json take() { return std::move(root_); }

 private:
  template <class T>
  Json* add(T&& value) {
    spend_work(2);
    if (++num_values_ > limits_.values) {
      throw JsonTextError(fmt::format("more than {} values", limits_.values), true, 0);
    }
    if (stack_.empty()) {
      root_ = std::forward<T>(value);
      return &root_;
    }
    Json& parent = *stack_.back();
    if (parent.is_array()) {
      auto& items = parent.get_ref<Json::array_t&>();
      return &items.emplace_back(std::forward<T>(value));
    }
    Json& member = parent.get_ref<Json::object_t&>().back().second;
    member = std::forward<T>(value);
    return &member;
  }

  bool open(Json value) {
    if (stack_.size() >= limits_.depth) {
      throw JsonTextError(fmt::format("nested deeper than {} levels at {}", limits_.depth, path()), true, 0);
    }
    // Its place does not move while it is open: only the innermost grows.
    stack_.push_back(add(std::move(value)));
    return true;
  }

  void check_keys() {
    Members& members = stack_.back()->get_ref<Json::object_t&>();
    constexpr size_t kFew = 16;
    if (members.size() <= kFew) {
      for (size_t i = 1; i < members.size(); ++i) {
        for (size_t j = 0; j < i; ++j) {
          if (members[i].first == members[j].first) return equal_keys(members);
        }
      }
      return;
    }
    const std::vector<uint32_t> order = by_key(members);
    spend_work(members.size() * 8);
    for (size_t i = 1; i < order.size(); ++i) {
      if (members[order[i]].first == members[order[i - 1]].first) return equal_keys(members);
    }
  }

  static std::vector<uint32_t> by_key(const Members& members) {
    std::vector<uint32_t> order(members.size());
    std::iota(order.begin(), order.end(), 0);
    // No hash: nobody can choose keys that make this slow.
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      const int compared = members[a].first.compare(members[b].first);
      return compared != 0 ? compared < 0 : a < b;
    });
    return order;
  }

  // The first of equal keys keeps its place and gets the last one's value.
  void equal_keys(Members& members) {
    const std::vector<uint32_t> order = by_key(members);
    std::vector<uint32_t> value_of(
        members.size());  // whose value; where it is not its own, dropped if smaller
    std::vector<uint8_t> dropped(members.size(), 0);
    for (size_t i = 0; i < order.size();) {
      size_t end = i + 1;
      while (end < order.size() && members[order[end]].first == members[order[i]].first) ++end;
      if (end > i + 1 && !limits_.last_key_wins) {
        refuse(fmt::format("has the key \"{}\" twice", shown(members[order[i]].first, 60)));
      }
      value_of[order[i]] = order[end - 1];
      for (size_t j = i + 1; j < end; ++j) dropped[order[j]] = 1;
      i = end;
    }
    Members kept;
    kept.reserve(members.size());
    for (size_t i = 0; i < members.size(); ++i) {
      if (dropped[i] != 0) continue;
      kept.emplace_back(members[i].first, std::move(members[value_of[i]].second));
    }
    members = std::move(kept);
  }

  // Of what is being read: messages[3].content
  std::string path() const {
    std::string out;
    for (const Json* open : stack_) {
      if (open->is_array()) {
        out += fmt::format("[{}]", open->empty() ? 0 : open->size() - 1);
      } else if (!open->empty()) {
        if (!out.empty()) out += '.';
        out += shown(open->get_ref<const Json::object_t&>().back().first, 40);
      }
    }
    return shown(out);
  }

  [[noreturn]] void refuse(const std::string& problem) {
    stack_.pop_back();  // named by its place in what holds it
    const std::string where = path();
    throw JsonTextError(fmt::format("{} {}", where.empty() ? "the object" : "'" + where + "'", problem), true,
                        0);
  }

  const JsonLimits& limits_;
  Json root_;
  std::vector<Json*> stack_;  // what is open, outermost first
  size_t num_values_ = 0;
};

}  // namespace

Json parse_json_tree(std::string_view text, const JsonLimits& limits) {
  {
    TreeBuilder builder(limits);
    if (JsonReader<TreeBuilder>(text, builder).read()) return builder.take();
  }
  // Once more, to say what is wrong and where; nlohmann takes a little more than the standard (a byte order
  // mark).
  TreeBuilder builder(limits);
  Json::sax_parse(text.data(), text.data() + text.size(), &builder);
  return builder.take();
}

}  // namespace millrace
