// The hub's API over HttpClient: what a repository has, where a file lies. Asks again where that may help,
// and says in one line what is wrong where it does not. The token goes to the endpoint and to nobody else.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hub/http_client.h"
#include "hub/model_name.h"
#include "hub/repo_file.h"
#include "hub/settings.h"

namespace millrace::hub {

struct Stopped {};  // thrown by HubClient::look when the caller wants no more; caught in pull()

class HubClient {
 public:
  // `keep_going` is asked several times a second while something is waited for; empty: always.
  explicit HubClient(const Settings& settings, std::function<bool()> keep_going = {});

  struct Repository {
    std::string commit, license;
    std::vector<RepoFile> files;
  };
  Repository repository(const ModelName& name);

  // Where the content of a file is today. The address may be signed and expire.
  struct Location {
    std::string path, url, etag;
    uint64_t size = 0;
    bool has_size = false;
  };
  Location locate(const ModelName& name, const std::string& commit, const std::string& path);

  // Bytes [begin, end) of a file.
  std::string read(const ModelName& name, const Location& location, uint64_t begin, uint64_t end);

  // With the token where it belongs, and no compression: sizes and ranges are the file's.
  HttpQuery query(const std::string& url) const;
  bool is_endpoint(std::string_view url) const;  // the same scheme, host and port
  HttpClient& http() { return *http_; }
  void look() const;  // throws Stopped
  void pause(std::chrono::milliseconds time) const;

  // Throws what a bad answer means.
  [[noreturn]] void refuse(const HttpAnswer& answer, const ModelName& name, const std::string& what) const;

 private:
  struct Reply {
    HttpAnswer answer;
    std::string body, url;  // url: the last one asked
    bool cut = false;       // the body was longer than wanted
  };
  Reply once(HttpQuery query, size_t most_bytes);
  Reply ask(const std::string& url, bool head, const std::vector<std::string>& headers, size_t most_bytes);
  std::string file_url(const ModelName& name, const std::string& commit, const std::string& path) const;

  const Settings& settings_;
  std::function<bool()> keep_going_;
  std::unique_ptr<HttpClient> http_;
};

// How long to wait before the same is asked again; empty: it is no use. `tries`: those that failed so far.
std::optional<std::chrono::milliseconds> retry_after(const HttpAnswer& answer, int tries);

// `location` of an answer to `url`, as an address that can be asked.
std::string redirected(const std::string& url, const std::string& location);

// Without W/ and quotes; empty when it is not fit to be a file's name.
std::string etag_name(std::string etag);

}  // namespace millrace::hub
