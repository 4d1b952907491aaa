// hf:owner/name[@revision][:choice] in all the ways that people write it, checked so that no part of it can
// lead out of the cache's folder or of the hub's API.
#include "hub/model_name.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "hub/safe_path.h"

namespace millrace::hub {
namespace {

constexpr size_t kMaxRepo = 96 * 2 + 1;  // the hub's own limit is 96 for each half

// The rest behind one of the prefixes; `page`: it is an address of the hub's site.
struct Address {
  std::string_view rest;
  bool page = false;
};

std::optional<Address> without_prefix(std::string_view text) {
  for (const std::string_view prefix : {"https://", "http://"}) {
    if (text.starts_with(prefix)) text.remove_prefix(prefix.size());
  }
  constexpr std::array<std::pair<std::string_view, bool>, 4> kPrefixes = {
      {{"hf://", false}, {"hf:", false}, {"huggingface.co/", true}, {"hf.co/", true}}};
  for (const auto& [prefix, page] : kPrefixes) {
    if (text.starts_with(prefix)) return Address{text.substr(prefix.size()), page};
  }
  return std::nullopt;
}

[[noreturn]] void malformed(std::string_view text, const char* what) {
  throw_error(ErrorCode::kBadInput,
              "{}: found {}, expected hf:owner/name, with @revision or :file or :quantization behind it if "
              "wanted",
              text, what);
}

bool is_repo(std::string_view repo) {
  if (repo.empty() || repo.size() > kMaxRepo || std::count(repo.begin(), repo.end(), '/') > 1) return false;
  if (repo.find("--") != std::string_view::npos || repo.find("..") != std::string_view::npos) return false;
  return is_safe_path(repo) && std::all_of(repo.begin(), repo.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
                  c == '-' || c == '_' || c == '/';
         });
}

// owner/name/blob/main/file, owner/name/resolve/main/file, owner/name/tree/main
void split_page(std::string_view rest, ModelName& name) {
  rest = rest.substr(0, rest.find_first_of("?#"));
  while (rest.ends_with('/')) rest.remove_suffix(1);
  const size_t owner_end = rest.find('/');
  const size_t repo_end = owner_end == std::string_view::npos ? owner_end : rest.find('/', owner_end + 1);
  name.repo = rest.substr(0, repo_end);
  if (repo_end == std::string_view::npos) return;
  rest.remove_prefix(repo_end + 1);
  for (const std::string_view kind : {"blob/", "resolve/", "tree/"}) {
    if (!rest.starts_with(kind)) continue;
    rest.remove_prefix(kind.size());
    const size_t end = rest.find('/');
    name.revision = rest.substr(0, end);
    if (end != std::string_view::npos) name.choice = rest.substr(end + 1);
    return;
  }
  name.repo += "/" + std::string(rest);  // too long: refused below
}

}  // namespace

std::string ModelName::text() const {
  std::string out = "hf:" + repo;
  if (revision != "main") out += "@" + revision;
  if (!choice.empty()) out += ":" + choice;
  return out;
}

std::optional<ModelName> parse_name(std::string_view text) {
  const std::optional<Address> address = without_prefix(text);
  if (!address) return std::nullopt;
  ModelName name;
  std::string_view rest = address->rest;
  const size_t colon = rest.find(':');
  if (colon != std::string_view::npos) {
    name.choice = rest.substr(colon + 1);
    if (name.choice.empty()) malformed(text, "nothing behind the colon");
    rest = rest.substr(0, colon);
  }
  const size_t at = rest.find('@');
  if (at != std::string_view::npos) {
    name.revision = rest.substr(at + 1);
    rest = rest.substr(0, at);
  }
  if (address->page && at == std::string_view::npos && colon == std::string_view::npos) {
    split_page(rest, name);
  } else {
    name.repo = rest;
  }
  if (!is_repo(name.repo)) malformed(text, "no name of a repository");
  if (!is_safe_path(name.revision)) malformed(text, "no name of a revision behind the @");
  if (!name.choice.empty() && !is_safe_path(name.choice))
    malformed(text, "no name of a file behind the colon");
  return name;
}

}  // namespace millrace::hub
