#include "chat/harmony_header.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "chat/json_scanner.h"

namespace millrace::chat {
namespace {

constexpr std::array<std::string_view, 3> kChannels = {"analysis", "commentary", "final"};
constexpr std::string_view kAssistant = "assistant";
constexpr std::array<std::string_view, 5> kRoles = {kAssistant, "user", "system", "developer", "tool"};
constexpr std::array<std::string_view, 3> kTypes = {"json", "code", "text"};
constexpr std::array<std::string_view, 3> kRecipients = {"to=", "functions.", "browser."};
constexpr size_t kMaxWord = 256;

template <size_t n>
bool is_one_of(const std::array<std::string_view, n>& words, std::string_view word, bool whole) {
  return std::any_of(words.begin(), words.end(),
                     [&](std::string_view known) { return whole ? known == word : known.starts_with(word); });
}

// Letters of names and beyond ASCII.
bool is_name(std::string_view word) {
  return !word.empty() && word.size() <= kMaxWord && std::all_of(word.begin(), word.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.' || c == ':' || c == '/' || (c & 0x80) != 0;
  });
}

bool is_recipient(std::string_view word, bool whole) {
  for (const std::string_view head : kRecipients) {
    if (!whole && head.starts_with(word)) return true;
    if (word.starts_with(head) && (is_name(word.substr(head.size())) || (!whole && word == head)))
      return true;
  }
  return false;
}

}  // namespace

bool HarmonyHeader::fits(const std::string& word, bool whole) const {
  if (channel_next_ || type_next_) return is_name(word);
  if (is_recipient(word, whole) || is_one_of(kTypes, word, whole)) return true;
  if (!role_possible_) return false;
  if (place_ == Place::kStart && now_.role.empty()) return is_name(word);
  return word == kAssistant || is_one_of(kChannels, word, whole) || (!whole && kAssistant.starts_with(word));
}

bool HarmonyHeader::take_word() {
  const bool first = role_possible_ && now_.role.empty();
  if (channel_next_) {
    now_.channel = word_;
    return is_one_of(kChannels, word_, true);
  }
  if (type_next_) return true;
  if (first && place_ == Place::kStart && !word_.starts_with("to=")) {
    now_.role = word_;
    return is_one_of(kRoles, word_, true) || is_recipient(word_, true);
  }
  if (is_recipient(word_, true)) {
    const bool marked = word_.starts_with("to=");
    now_.recipient = marked ? word_.substr(3) : word_;
    return marked;
  }
  // The model forgot <|channel|>, or writes about one.
  if (is_one_of(kChannels, word_, true)) now_.channel = word_;
  return false;
}

bool HarmonyHeader::end_word() {
  if (word_.empty()) return true;
  if (!fits(word_, true)) return fail();
  if (take_word()) {
    text_.clear();
    sure_ = now_;
  }
  channel_next_ = type_next_ = false;
  word_.clear();
  return true;
}

bool HarmonyHeader::fail() {
  now_ = sure_;
  return false;
}

bool HarmonyHeader::add(char c) {
  if (is_space(c)) {
    const bool had_word = !word_.empty();
    const bool is_known = end_word();
    // One space behind a header's word is its own.
    if (!had_word || !text_.empty()) text_ += c;
    return is_known;
  }
  // Arguments right behind a whole word: json{"a":1}.
  if ((c == '{' || c == '[') && end_word()) {
    text_ += c;
    return fail();
  }
  word_ += c;
  text_ += c;
  return fits(word_, false) || fail();
}

bool HarmonyHeader::begin_channel() {
  if (!end_word()) return false;
  text_.clear();
  now_.channel.clear();
  sure_ = now_;
  channel_next_ = true;
  role_possible_ = false;
  return true;
}

bool HarmonyHeader::begin_type() {
  if (!end_word()) return false;
  text_.clear();
  sure_ = now_;
  channel_next_ = false;
  type_next_ = true;
  role_possible_ = false;
  return true;
}

bool HarmonyHeader::end() { return end_word(); }

void HarmonyHeader::abandon(bool cut) {
  const bool marked = place_ == Place::kStart || !role_possible_;
  if (cut && marked && !word_.empty() &&
      (is_recipient(word_, false) || is_one_of(kChannels, word_, false) || is_one_of(kRoles, word_, false) ||
       is_one_of(kTypes, word_, false))) {
    text_.erase(text_.size() - word_.size());
    word_.clear();
  }
  end_word();
  fail();
  if (std::all_of(text_.begin(), text_.end(), is_space)) text_.clear();
}

bool HarmonyHeader::other_role() const {
  return now_.role != "assistant" &&
         (is_one_of(kRoles, now_.role, true) || now_.role.starts_with("functions.") ||
          now_.role.starts_with("browser."));
}

}  // namespace millrace::chat
