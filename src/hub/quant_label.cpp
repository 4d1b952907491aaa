#include "hub/quant_label.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace millrace::hub {
namespace {

std::string capitals(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return out;
}

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// How many characters at the start of `text` (capitals) are a label; 0: none. A label ends where a word ends.
size_t label_length(std::string_view text) {
  const auto ends = [&](size_t at) { return at >= text.size() || !is_word(text[at]); };
  for (const std::string_view whole : {"MXFP4_MOE", "MXFP4", "NVFP4", "BF16", "FP16", "F16", "FP32", "F32"}) {
    if (text.starts_with(whole) && ends(whole.size())) return whole.size();
  }
  size_t at = 0;
  for (const std::string_view family : {"IQ", "TQ", "Q"}) {
    if (text.starts_with(family)) {
      at = family.size();
      break;
    }
  }
  if (at == 0 || at >= text.size() || !is_digit(text[at]) || !ends(at + 1)) return 0;
  ++at;
  // _K_M, _0, _XXS, _0_4_4: pieces of this alphabet follow.
  constexpr std::array<std::string_view, 14> kPieces = {"XXS", "XXL", "XS", "XL", "NL", "0", "1",
                                                        "4",   "8",   "K",  "S",  "M",  "L", "P"};
  for (bool more = true; more;) {
    more = false;
    if (at >= text.size() || text[at] != '_') break;
    for (const std::string_view piece : kPieces) {
      if (text.substr(at + 1).starts_with(piece) && ends(at + 1 + piece.size())) {
        at += 1 + piece.size();
        more = true;
        break;
      }
    }
  }
  return at;
}

std::string last_label(std::string_view given) {
  const std::string text = capitals(given);
  std::string found;
  for (size_t at = 0; at < text.size(); ++at) {
    if (at > 0 && is_word(text[at - 1])) continue;
    const size_t length = label_length(std::string_view(text).substr(at));
    if (length == 0) continue;
    const bool dynamic = at >= 3 && text.compare(at - 3, 3, "UD-") == 0;  // a mix of types chosen by tensor
    found = (dynamic ? "UD-" : "") + text.substr(at, length);
    at += length;
  }
  return found;
}

}  // namespace

std::string quant_label(std::string_view path) {
  const std::string prefix = part_name(path).prefix;
  const size_t slash = prefix.rfind('/');
  std::string label = last_label(slash == std::string::npos ? prefix : prefix.substr(slash + 1));
  if (label.empty() && slash != std::string::npos) label = last_label(prefix.substr(0, slash));
  return label;
}

std::string label_key(std::string_view text) {
  std::string out = capitals(text);
  std::replace(out.begin(), out.end(), '-', '_');
  if (out == "FP16") return "F16";
  if (out == "FP32") return "F32";
  return out;
}

int label_rank(std::string_view label) {
  // Small and good first, then larger ones by size: whoever wants another says so.
  constexpr std::array<std::string_view, 18> kOrder = {
      "Q4_K_M", "MXFP4",  "MXFP4_MOE", "Q4_K_S", "Q4_K_L", "Q4_K_XL", "UD_Q4_K_XL", "Q4_1", "Q4_0",
      "Q5_K_M", "Q5_K_S", "Q5_1",      "Q5_0",   "Q6_K",   "Q8_0",    "BF16",       "F16",  "F32"};
  const std::string key = label_key(label);
  const auto found = std::find(kOrder.begin(), kOrder.end(), key);
  if (found != kOrder.end()) return static_cast<int>(found - kOrder.begin());
  for (const std::string_view family : {"Q4", "Q5", "Q6", "Q8", "UD_Q4", "UD_Q5", "UD_Q6", "UD_Q8"}) {
    if (key.starts_with(family)) return 100;
  }
  return key.empty() ? 200 : kUnloadable;  // no label: whatever it is, it may be all there is
}

PartName part_name(std::string_view path) {
  PartName name{std::string(path), 1, 1};
  if (path.ends_with(".gguf")) name.prefix.resize(path.size() - 5);
  // -00001-of-00003
  constexpr size_t kLength = 15;
  const std::string_view stem = name.prefix;
  if (stem.size() <= kLength) return name;
  const std::string_view tail = stem.substr(stem.size() - kLength);
  const auto digits = [&](size_t from) {
    int value = 0;
    for (size_t i = from; i < from + 5; ++i) {
      if (!is_digit(tail[i])) return -1;
      value = value * 10 + (tail[i] - '0');
    }
    return value;
  };
  if (tail[0] != '-' || tail.substr(6, 4) != "-of-") return name;
  const int part = digits(1), parts = digits(10);
  if (part < 1 || parts < 1 || part > parts) return name;
  return {std::string(stem.substr(0, stem.size() - kLength)), part, parts};
}

}  // namespace millrace::hub
