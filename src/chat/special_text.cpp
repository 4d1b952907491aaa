#include "chat/special_text.h"

#include <algorithm>
#include <bitset>

#include "base/error.h"
#include "base/json_tree.h"
#include "base/work_budget.h"

namespace millrace::chat {
namespace {

using Json = nlohmann::ordered_json;

// Private use: U+E000 and on, as UTF-8.
std::string private_character(int number) {
  return {static_cast<char>(0xee), static_cast<char>(0x80 + number / 64),
          static_cast<char>(0x80 + number % 64)};
}
constexpr int kPrivateCharacters = 64 * 64;

size_t first_character(std::string_view text) {
  size_t length = 1;
  while (length < text.size() && (text[length] & 0xc0) == 0x80) ++length;
  return length;
}

void append(const std::vector<int32_t>& ids, std::vector<int32_t>& out) {
  out.insert(out.end(), ids.begin(), ids.end());
}

// Until there are more than max_tokens in `out`.
void append_text(const Codec& codec, std::string_view text, bool parse_special, size_t max_tokens,
                 std::vector<int32_t>& out) {
  if (out.size() > max_tokens) return;
  append(codec.encode(text, parse_special, max_tokens - out.size()), out);
}

// Letters only. A marker is an ordinary token and would be found: it is cut where it was masked.
void append_literal(const Codec& codec, std::string_view text, const SpecialText::Mask& mask,
                    size_t max_tokens, std::vector<int32_t>& out) {
  while (!text.empty() && out.size() <= max_tokens) {
    const size_t cut = text.find(mask.marker);
    append_text(codec, SpecialText::unmask(text.substr(0, cut), mask), false, max_tokens, out);
    text.remove_prefix(cut == std::string_view::npos ? text.size() : cut + mask.marker.size());
  }
}

}  // namespace

SpecialText::SpecialText(const Codec& codec, const std::vector<std::string>& markers) {
  for (int32_t token = 0; token < codec.vocab(); ++token) {
    if (!codec.is_special(token)) continue;
    std::string name = codec.token_text(token);
    if (name.size() > first_character(name)) names_.push_back({std::move(name), false});
  }
  for (const std::string& marker : markers) {
    const bool listed =
        std::any_of(names_.begin(), names_.end(), [&](const Name& n) { return n.text == marker; });
    if (!listed && codec.encode(marker, false).size() == 1) names_.push_back({marker, true});
  }
  std::stable_sort(names_.begin(), names_.end(),
                   [](const Name& a, const Name& b) { return a.text.size() > b.text.size(); });
  for (const Name& name : names_) begins_name_[static_cast<unsigned char>(name.text[0])] = true;
}

const SpecialText::Name* SpecialText::find(std::string_view text, size_t from, size_t& at) const {
  for (at = from; at < text.size(); ++at) {
    if (!begins_name_[static_cast<unsigned char>(text[at])]) continue;
    spend_work(names_.size() / 8 + 1);
    for (const Name& name : names_) {
      if (text.compare(at, name.text.size(), name.text) == 0) return &name;
    }
  }
  return nullptr;
}

bool SpecialText::has_name(const Json& value) const {
  size_t at = 0;
  if (value.is_string()) return find(value.get_ref<const std::string&>(), 0, at) != nullptr;
  if (!value.is_structured()) return false;
  return std::any_of(value.items().begin(), value.items().end(), [&](const auto& item) {
    return (value.is_object() && find(item.key(), 0, at) != nullptr) || has_name(item.value());
  });
}

SpecialText::Mask SpecialText::choose_mask(const Json& value) const {
  if (!has_name(value)) return {};
  // Which of them occur, in one look at all there is.
  std::bitset<kPrivateCharacters> used;
  const std::string all = value.dump();
  for (size_t at = all.find('\xee'); at != std::string::npos; at = all.find('\xee', at + 3)) {
    if (at + 2 >= all.size()) break;
    used.set(static_cast<size_t>((all[at + 1] & 0x3f) * 64 + (all[at + 2] & 0x3f)));
  }
  std::vector<std::string> unused;
  for (int i = 0; i < kPrivateCharacters && unused.size() < 2; ++i) {
    if (!used.test(static_cast<size_t>(i))) unused.push_back(private_character(i));
  }
  if (unused.size() < 2) {
    throw_error(ErrorCode::kBadInput,
                "messages: they use every character from U+E000 to U+EFFF, expected two left over");
  }
  return {.control = unused[0], .marker = unused[1]};
}

void SpecialText::mask(Json& value, const Mask& mask, bool keep_markers) const {
  if (value.is_string()) {
    value = masked(value.get<std::string>(), mask, keep_markers);
  } else if (value.is_array()) {
    for (Json& item : value) this->mask(item, mask, keep_markers);
  } else if (value.is_object()) {
    Json out = Json::object();
    for (auto& [key, item] : value.items()) {
      this->mask(item, mask, keep_markers);
      // Other keys stay other keys: what was put in occurs nowhere else.
      append_member(out, masked(key, mask, keep_markers), std::move(item));
    }
    value = std::move(out);
  }
}

// From one name's first character on the next is looked for: names may overlap.
std::string SpecialText::masked(const std::string& text, const Mask& mask, bool keep_markers) const {
  std::string out;
  size_t done = 0, at = 0;
  for (const Name* name = find(text, 0, at); name != nullptr; name = find(text, at + 1, at)) {
    if (name->is_marker && keep_markers) continue;
    const size_t behind = at + first_character(name->text);
    out.append(text, done, behind - done);
    out += name->is_marker ? mask.marker : mask.control;
    done = behind;
  }
  out.append(text, done, std::string::npos);
  return out;
}

std::string SpecialText::unmask(std::string_view text, const Mask& mask) {
  std::string out;
  while (!text.empty()) {
    if (!mask.empty() && (text.substr(0, 3) == mask.control || text.substr(0, 3) == mask.marker)) {
      text.remove_prefix(3);
    } else {
      out += text[0];
      text.remove_prefix(1);
    }
  }
  return out;
}

std::vector<int32_t> SpecialText::encode(const Codec& codec, std::string_view rendered, const Mask& mask,
                                         size_t max_tokens) const {
  if (mask.empty()) return codec.encode(rendered, true, max_tokens);
  // Between two names of the template a run of text is taken by letters if anything in it was masked; all
  // else goes to the tokenizer in one piece.
  std::vector<int32_t> out;
  size_t taken = 0, run = 0;
  while (run <= rendered.size() && out.size() <= max_tokens) {
    size_t at = 0;
    const Name* name = find(rendered, run, at);
    const size_t end = name != nullptr ? at : rendered.size();
    const std::string_view text = rendered.substr(run, end - run);
    if (text.find(mask.control) != std::string_view::npos ||
        text.find(mask.marker) != std::string_view::npos) {
      append_text(codec, rendered.substr(taken, run - taken), true, max_tokens, out);
      append_literal(codec, text, mask, max_tokens, out);
      taken = end;
    }
    if (name == nullptr) break;
    run = end + name->text.size();
  }
  append_text(codec, rendered.substr(taken), true, max_tokens, out);
  return out;
}

}  // namespace millrace::chat
