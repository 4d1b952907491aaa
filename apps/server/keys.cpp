#include "keys.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>

#include "base/error.h"
#include "base/mapped_file.h"

namespace millrace::server {

bool constant_time_equal(std::string_view given, std::string_view expected) {
  if (expected.empty()) return false;
  unsigned char differs = given.size() == expected.size() ? 0 : 1;
  size_t j = 0;
  for (const char c : given) {
    differs = static_cast<unsigned char>(differs | (c ^ expected[j]));
    j = j + 1 == expected.size() ? 0 : j + 1;
  }
  // The compiler must not see that it could stop early.
  volatile unsigned char result = differs;
  return result == 0;
}

Keys Keys::from_file(const std::string& path) { return from_text(read_text_file(path), path); }

namespace {

std::vector<std::string_view> words_of(std::string_view line) {
  constexpr std::string_view kSpace = " \t\r";
  std::vector<std::string_view> words;
  size_t begin = 0;
  while ((begin = line.find_first_not_of(kSpace, begin)) != std::string_view::npos) {
    const size_t end = std::min(line.find_first_of(kSpace, begin), line.size());
    words.push_back(line.substr(begin, end - begin));
    begin = end;
  }
  return words;
}

// "rate=600" and its like: true when it is one of them. Throws when its number is none.
bool read_limit(std::string_view word, Keys::Key& key) {
  const size_t equals = word.find('=');
  if (equals == std::string_view::npos) return false;
  const std::string_view name = word.substr(0, equals), value = word.substr(equals + 1);
  const auto number = [&](double least, double most) {
    double result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error != std::errc() || end != value.data() + value.size() || !(result >= least && result <= most)) {
      throw_error(ErrorCode::kBadInput, "found {}={}, expected a number from {} to {}", name, value, least,
                  most);
    }
    return result;
  };
  constexpr double kMost = 1e9, kMostPriority = 1e6;
  if (name == "rate") {
    key.rate = number(0, kMost);
  } else if (name == "tokens") {
    key.tokens = number(0, kMost);
  } else if (name == "running") {
    key.running = static_cast<int32_t>(number(0, kMost));
  } else if (name == "priority") {
    key.priority = static_cast<int32_t>(number(-kMostPriority, kMostPriority));
  } else {
    return false;
  }
  return true;
}

Keys::Key read_key(std::vector<std::string_view> words, size_t number) {
  Keys::Key key;
  while (words.size() > 1 && read_limit(words.back(), key)) words.pop_back();
  if (words.size() > 2) {
    throw_error(ErrorCode::kBadInput, "found {} words, expected KEY or NAME KEY and limits such as rate=600",
                words.size());
  }
  key.name = words.size() == 2 ? std::string(words[0]) : fmt::format("key-{}", number);
  key.secret = words.back();
  return key;
}

}  // namespace

Keys Keys::from_text(std::string_view text, const std::string& source) {
  Keys keys;
  int line_number = 0;
  while (!text.empty()) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    ++line_number;
    std::vector<std::string_view> words = words_of(line.substr(0, line.find('#')));
    if (words.empty()) continue;
    try {
      keys.keys_.push_back(read_key(std::move(words), keys.keys_.size() + 1));
    } catch (const Error& error) {
      throw_error(ErrorCode::kBadInput, "{}: line {}: {}", source, line_number, error.what());
    }
  }
  if (keys.keys_.empty())
    throw_error(ErrorCode::kBadInput, "{}: found no key, expected at least one", source);
  return keys;
}

const Keys::Key* Keys::find(std::string_view secret) const {
  const Key* found = nullptr;
  for (const Key& key : keys_) {  // all of them, always
    if (constant_time_equal(secret, key.secret)) found = &key;
  }
  return found;
}

const Keys::Key* Keys::check(std::string_view authorization) const {
  constexpr std::string_view kScheme = "bearer ";
  if (!same_word(authorization.substr(0, kScheme.size()), kScheme)) return nullptr;
  return find(authorization.substr(kScheme.size()));
}

ClientLimits Keys::Key::limits(ClientLimits otherwise) const {
  return {.requests_per_minute = rate.value_or(otherwise.requests_per_minute),
          .tokens_per_minute = tokens.value_or(otherwise.tokens_per_minute),
          .running = running.value_or(otherwise.running),
          .max_priority = priority.value_or(otherwise.max_priority)};
}

}  // namespace millrace::server
