// The environment variables of Hugging Face's own tools, with their rules.
#include "hub/settings.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>

#include "base/error.h"
#include "base/mapped_file.h"

namespace millrace::hub {
namespace {

std::string text_of(const char* value) { return value == nullptr ? std::string() : std::string(value); }

bool is_true(std::string value) {
  std::transform(value.begin(), value.end(), value.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return value == "1" || value == "ON" || value == "YES" || value == "TRUE";
}

// "~/x" as a shell would write it.
std::string expanded(const std::string& path) {
  if (path == "~" || path.starts_with("~/")) return text_of(std::getenv("HOME")) + path.substr(1);
  return path;
}

std::string home() {
  if (const std::string given = text_of(std::getenv("HF_HOME")); !given.empty()) return expanded(given);
  if (const std::string cache = text_of(std::getenv("XDG_CACHE_HOME")); !cache.empty()) {
    return expanded(cache) + "/huggingface";
  }
  const std::string user = text_of(std::getenv("HOME"));
  if (user.empty()) {
    throw_error(ErrorCode::kBadInput,
                "the cache of models: found none of HF_HOME, XDG_CACHE_HOME and HOME, expected one of them");
  }
  return user + "/.cache/huggingface";
}

std::string trimmed(std::string text) {
  const auto space = [](unsigned char c) { return std::isspace(c) != 0; };
  text.erase(text.begin(), std::find_if_not(text.begin(), text.end(), space));
  text.erase(std::find_if_not(text.rbegin(), text.rend(), space).base(), text.end());
  return text;
}

std::string read_token(const std::string& hf_home) {
  if (std::string token = trimmed(text_of(std::getenv("HF_TOKEN"))); !token.empty()) return token;
  const std::string given = text_of(std::getenv("HF_TOKEN_PATH"));
  const std::string path = given.empty() ? hf_home + "/token" : expanded(given);
  return ::access(path.c_str(), R_OK) == 0 ? trimmed(read_text_file(path)) : std::string();
}

}  // namespace

Settings settings_from_environment() {
  Settings settings;
  if (const std::string endpoint = trimmed(text_of(std::getenv("HF_ENDPOINT"))); !endpoint.empty()) {
    settings.endpoint = endpoint;
    while (settings.endpoint.ends_with('/')) settings.endpoint.pop_back();
    if (!settings.endpoint.starts_with("https://") && !settings.endpoint.starts_with("http://")) {
      throw_error(ErrorCode::kBadInput, "HF_ENDPOINT: found {}, expected an address with https:// or http://",
                  endpoint);
    }
  }
  const std::string hf_home = home();
  const std::string cache = text_of(std::getenv("HF_HUB_CACHE"));
  settings.cache = std::filesystem::absolute(cache.empty() ? hf_home + "/hub" : expanded(cache)).string();
  settings.token = read_token(hf_home);
  if (std::any_of(settings.token.begin(), settings.token.end(), [](unsigned char c) { return c <= 0x20; })) {
    throw_error(ErrorCode::kBadInput, "the token (HF_TOKEN): found spaces or line ends inside it");
  }
  settings.offline = is_true(text_of(std::getenv("HF_HUB_OFFLINE")));
  return settings;
}

}  // namespace millrace::hub
