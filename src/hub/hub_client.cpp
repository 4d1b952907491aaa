#include "hub/hub_client.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.h"
#include "hub/safe_path.h"

namespace millrace::hub {
namespace {

using Json = nlohmann::json;
using std::chrono::milliseconds;

constexpr int kMaxTries = 5;             // with waits of 0.5, 1, 2 and 4 s between them
constexpr int kMaxUnreachableTries = 2;  // a name that is not found is rarely found a second later
constexpr milliseconds kFirstWait{500};
constexpr int kLongestWaitSeconds = 120;  // a server that wants more is told to the user
constexpr int kMaxRedirects = 8;
constexpr size_t kMaxApiBytes = size_t{64} << 20;  // lists of repositories with 100,000 files

std::string encoded(std::string_view text, std::string_view also_kept) {
  std::string out;
  for (const char c : text) {
    const bool kept = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                      std::string_view("-._~").find(c) != std::string_view::npos ||
                      also_kept.find(c) != std::string_view::npos;
    if (kept) {
      out += c;
    } else {
      out += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    }
  }
  return out;
}

std::string_view origin_of(std::string_view url) {
  const size_t scheme = url.find("://");
  if (scheme == std::string_view::npos) return {};
  return url.substr(0, url.find_first_of("/?#", scheme + 3));
}

int number_of(std::string_view text, int fallback) {
  int value = fallback;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end != text.data() ? value : fallback;
}

// Retry-After: 7, or RateLimit: "api";r=0;t=7
int wanted_wait_seconds(const HttpAnswer& answer) {
  if (const std::string seconds = answer.header("retry-after"); !seconds.empty())
    return number_of(seconds, 0);
  const std::string limit = answer.header("ratelimit");
  const size_t at = limit.find("t=");
  return at == std::string::npos ? 0 : number_of(std::string_view(limit).substr(at + 2), 0);
}

bool is_redirect(int status) {
  return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

std::string text_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

RepoFile file_of(const Json& entry) {
  RepoFile file;
  file.path = text_at(entry, "rfilename");
  file.blob_sha1 = text_at(entry, "blobId");
  if (const auto size = entry.find("size"); size != entry.end() && size->is_number_unsigned()) {
    file.size = size->get<uint64_t>();
  }
  if (const auto lfs = entry.find("lfs"); lfs != entry.end() && lfs->is_object()) {
    file.sha256 = text_at(*lfs, "sha256");
    file.blob_sha1.clear();  // that is the pointer's
  }
  if (!is_hex(file.sha256, 64)) file.sha256.clear();
  if (!is_hex(file.blob_sha1, 40)) file.blob_sha1.clear();
  return file;
}

std::string license_of(const Json& info) {
  if (const auto card = info.find("cardData"); card != info.end() && card->is_object()) {
    if (std::string license = text_at(*card, "license"); !license.empty()) return license;
  }
  const auto tags = info.find("tags");
  if (tags == info.end() || !tags->is_array()) return {};
  for (const Json& tag : *tags) {
    constexpr std::string_view kPrefix = "license:";
    if (tag.is_string() && tag.get_ref<const std::string&>().starts_with(kPrefix)) {
      return tag.get<std::string>().substr(kPrefix.size());
    }
  }
  return {};
}

}  // namespace

std::optional<milliseconds> retry_after(const HttpAnswer& answer, int tries) {
  if (tries >= kMaxTries || (answer.unreachable && tries >= kMaxUnreachableTries)) return std::nullopt;
  const int s = answer.status;
  const bool passing = !answer.error.empty() || s == 408 || s == 425 || s == 429 || (s >= 500 && s != 501);
  if (!passing) return std::nullopt;
  const int wanted = wanted_wait_seconds(answer);
  if (wanted > kLongestWaitSeconds) return std::nullopt;
  return std::max<milliseconds>(kFirstWait * (1 << (tries - 1)), std::chrono::seconds(wanted));
}

std::string redirected(const std::string& url, const std::string& location) {
  if (location.find("://") != std::string::npos) return location;
  const std::string origin(origin_of(url));
  if (location.starts_with("//")) return origin.substr(0, origin.find("//")) + location;
  if (location.starts_with('/')) return origin + location;
  const std::string path = url.substr(0, url.find_first_of("?#"));
  return path.substr(0, path.rfind('/') + 1) + location;
}

std::string etag_name(std::string etag) {
  if (etag.starts_with("W/")) etag.erase(0, 2);
  std::erase(etag, '"');
  const bool plain = std::all_of(etag.begin(), etag.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
  });
  return plain && is_safe_path(etag) && etag.size() <= 128 ? etag : std::string();
}

HubClient::HubClient(const Settings& settings, std::function<bool()> keep_going)
    : settings_(settings), keep_going_(std::move(keep_going)) {
  if (settings.offline) {
    throw_error(ErrorCode::kIo,
                "HF_HUB_OFFLINE is set: nothing is fetched (`millrace list` shows what is here)");
  }
  http_ = make_http_client();
}

void HubClient::look() const {
  if (keep_going_ && !keep_going_()) throw Stopped{};
}

void HubClient::pause(milliseconds time) const {
  constexpr milliseconds kSlice{100};
  for (; time.count() > 0; time -= kSlice) {
    look();
    std::this_thread::sleep_for(std::min(time, kSlice));
  }
}

bool HubClient::is_endpoint(std::string_view url) const {
  return origin_of(url) == origin_of(settings_.endpoint);
}

HttpQuery HubClient::query(const std::string& url) const {
  HttpQuery query{.url = url, .head = false, .headers = {"Accept-Encoding: identity"}, .on_body = {}};
  if (!settings_.token.empty() && is_endpoint(url)) {
    query.headers.push_back("Authorization: Bearer " + settings_.token);
  }
  return query;
}

HubClient::Reply HubClient::once(HttpQuery query, size_t most_bytes) {
  Reply reply{{}, {}, query.url, false};
  query.on_body = [&](const HttpAnswer&, std::span<const std::byte> piece) {
    const size_t taken = std::min(piece.size(), most_bytes - reply.body.size());
    reply.body.append(reinterpret_cast<const char*>(piece.data()), taken);
    reply.cut = taken < piece.size();
    return !reply.cut;
  };
  const int number = http_->begin(std::move(query));
  while (true) {
    for (HttpClient::Finished& done : http_->wait(100)) {
      if (done.number != number) continue;
      reply.answer = std::move(done.answer);
      return reply;
    }
    try {
      look();
    } catch (...) {
      http_->stop(number);  // on_body's variables go
      throw;
    }
  }
}

HubClient::Reply HubClient::ask(const std::string& url, bool head, const std::vector<std::string>& headers,
                                size_t most_bytes) {
  std::string at = url;
  for (int tries = 1, redirects = 0;;) {
    HttpQuery query = this->query(at);
    query.head = head;
    query.headers.insert(query.headers.end(), headers.begin(), headers.end());
    Reply reply = once(std::move(query), most_bytes);
    if (is_redirect(reply.answer.status) && reply.answer.error.empty()) {
      const std::string next = redirected(at, reply.answer.header("location"));
      // A file on another host: that address is what the caller wants to know.
      if (head && !is_endpoint(next)) return reply;
      if (++redirects > kMaxRedirects) {
        throw_error(ErrorCode::kIo, "{}: found more than {} redirects, expected an answer", url,
                    kMaxRedirects);
      }
      at = next;
      continue;
    }
    const std::optional<milliseconds> wait = retry_after(reply.answer, tries);
    if (!wait) return reply;
    ++tries;
    pause(*wait);
  }
}

void HubClient::refuse(const HttpAnswer& answer, const ModelName& name, const std::string& what) const {
  const std::string code = answer.header("x-error-code");
  const std::string page = settings_.endpoint + "/" + name.repo;
  const char* token = settings_.token.empty() ? "no token was found: set HF_TOKEN or run `hf auth login`"
                                              : "the token that was found does not give access";
  const int status = answer.status;
  if (!answer.error.empty()) {
    throw_error(ErrorCode::kIo, "{}: cannot be fetched from {}: {}", what, settings_.endpoint, answer.error);
  }
  if (code == "GatedRepo") {
    throw_error(ErrorCode::kBadInput, "{}: is gated: accept its terms at {} first ({})", name.text(), page,
                token);
  }
  if (code == "RevisionNotFound") {
    throw_error(ErrorCode::kBadInput,
                "{}: found no revision '{}' of it, expected a branch, a tag or a commit", name.text(),
                name.revision);
  }
  if (code == "EntryNotFound") {
    throw_error(ErrorCode::kBadInput, "{}: found no such file in {}", what, name.repo);
  }
  if (status == 404 || code == "RepoNotFound") {
    throw_error(ErrorCode::kBadInput,
                "{}: found no such repository at {}, expected its owner and name as in {}{}", name.text(),
                settings_.endpoint, page, settings_.token.empty() ? " (a private one needs HF_TOKEN)" : "");
  }
  if (status == 401 || status == 403) {
    throw_error(ErrorCode::kBadInput, "{}: the hub refuses it with status {}: it is private or gated, and {}",
                name.text(), status, token);
  }
  if (status == 429) {
    const int seconds = wanted_wait_seconds(answer);
    throw_error(ErrorCode::kIo, "{}: the hub has had too many requests (429): try again in {} s{}",
                name.text(), std::max(seconds, 60),
                settings_.token.empty() ? ", or set HF_TOKEN for a higher limit" : "");
  }
  throw_error(ErrorCode::kIo, "{}: the hub answers with status {}, expected 200", what, status);
}

HubClient::Repository HubClient::repository(const ModelName& name) {
  const std::string url = fmt::format("{}/api/models/{}/revision/{}?blobs=true", settings_.endpoint,
                                      name.repo, encoded(name.revision, ""));
  const Reply reply = ask(url, false, {"Accept: application/json"}, kMaxApiBytes);
  if (reply.answer.status != 200 || !reply.answer.error.empty()) {
    refuse(reply.answer, name, name.text());
  }
  const Json info = reply.cut ? Json() : Json::parse(reply.body, nullptr, false);
  const std::string commit = info.is_object() ? text_at(info, "sha") : std::string();
  if (!is_commit(commit) || !info.contains("siblings") || !info["siblings"].is_array()) {
    throw_error(ErrorCode::kIo, "{}: found an answer of {} bytes, expected the description of a repository",
                url, reply.body.size());
  }
  Repository repository{commit, license_of(info), {}};
  for (const Json& entry : info["siblings"]) {
    if (!entry.is_object()) continue;
    RepoFile file = file_of(entry);
    if (is_safe_path(file.path)) repository.files.push_back(std::move(file));
  }
  return repository;
}

std::string HubClient::file_url(const ModelName& name, const std::string& commit,
                                const std::string& path) const {
  return fmt::format("{}/{}/resolve/{}/{}", settings_.endpoint, name.repo, commit, encoded(path, "/"));
}

HubClient::Location HubClient::locate(const ModelName& name, const std::string& commit,
                                      const std::string& path) {
  const Reply reply = ask(file_url(name, commit, path), true, {}, 0);
  const HttpAnswer& answer = reply.answer;
  const bool away = is_redirect(answer.status);
  if (!answer.error.empty() || (!away && answer.status != 200)) refuse(answer, name, path);
  Location location;
  location.path = path;
  location.url = away ? redirected(reply.url, answer.header("location")) : reply.url;
  const std::string linked = answer.header("x-linked-etag");
  location.etag = etag_name(linked.empty() ? answer.header("etag") : linked);
  const std::string size = answer.header("x-linked-size");
  const std::string& bytes = size.empty() && !away ? answer.header("content-length") : size;
  const auto [end, error] = std::from_chars(bytes.data(), bytes.data() + bytes.size(), location.size);
  location.has_size = !bytes.empty() && error == std::errc() && end == bytes.data() + bytes.size();
  return location;
}

std::string HubClient::read(const ModelName& name, const Location& location, uint64_t begin, uint64_t end) {
  if (begin >= end) return {};
  const std::string range = fmt::format("Range: bytes={}-{}", begin, end - 1);
  Reply reply = ask(location.url, false, {range}, end);
  const HttpAnswer& answer = reply.answer;
  if (!answer.error.empty() || (answer.status != 206 && answer.status != 200))
    refuse(answer, name, location.path);
  if (answer.status == 200) reply.body.erase(0, begin);  // a server without ranges: the file from its start
  if (reply.body.size() < end - begin) {
    throw_error(ErrorCode::kIo, "{}: found {} bytes, expected {}", location.path, reply.body.size(),
                end - begin);
  }
  reply.body.resize(end - begin);
  return std::move(reply.body);
}

}  // namespace millrace::hub
