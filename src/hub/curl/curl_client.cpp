// HttpClient by libcurl's multi interface. Proxies are libcurl's business (HTTPS_PROXY, ALL_PROXY, NO_PROXY
// and their like); HTTP/1.1 throughout, because parallel ranges are there to have connections of their own.
#include <curl/curl.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string_view>

#include "base/error.h"
#include "hub/http_client.h"

#ifndef MILLRACE_VERSION
#error "the build defines MILLRACE_VERSION"
#endif

namespace millrace::hub {
namespace {

constexpr long kConnectSeconds = 15;
constexpr long kSilentSeconds = 30;  // without a byte: the connection is dead
constexpr long kBufferBytes = 256 << 10;

struct Transfer {
  HttpQuery query;
  HttpAnswer answer;
  CURL* easy = nullptr;
  curl_slist* headers = nullptr;
  bool stopped = false;  // by on_body

  Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  ~Transfer() {
    if (easy != nullptr) curl_easy_cleanup(easy);
    curl_slist_free_all(headers);
  }
};

size_t on_header(char* data, size_t size, size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  std::string_view line(data, size * count);
  while (!line.empty() && (line.back() == '\r' || line.back() == '\n')) line.remove_suffix(1);
  if (line.starts_with("HTTP/")) {  // of the proxy's answer or of a 100 first, then of the real one
    transfer.answer.headers.clear();
    return size * count;
  }
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos) return size * count;
  std::string name(line.substr(0, colon));
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  std::string_view value = line.substr(colon + 1);
  while (!value.empty() && value.front() == ' ') value.remove_prefix(1);
  while (!value.empty() && value.back() == ' ') value.remove_suffix(1);
  transfer.answer.headers[name] = value;
  return size * count;
}

size_t on_data(char* data, size_t size, size_t count, void* user) {
  auto& transfer = *static_cast<Transfer*>(user);
  long status = 0;
  curl_easy_getinfo(transfer.easy, CURLINFO_RESPONSE_CODE, &status);
  transfer.answer.status = static_cast<int>(status);
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  if (!transfer.query.on_body || transfer.query.on_body(transfer.answer, {bytes, size * count})) {
    return size * count;
  }
  transfer.stopped = true;
  return 0;
}

// libcurl reads http_proxy in small letters alone, for the sake of CGI programs; the hf tool reads both.
const char* plain_proxy(const std::string& url) {
  if (!url.starts_with("http://") || std::getenv("http_proxy") != nullptr) return nullptr;
  return std::getenv("HTTP_PROXY");
}

void set_options(Transfer& transfer) {
  CURL* easy = transfer.easy;
  const auto set = [&](CURLoption option, auto value) {
    if (curl_easy_setopt(easy, option, value) != CURLE_OK) {
      throw_error(ErrorCode::kInternal, "libcurl refuses option {}", static_cast<int>(option));
    }
  };
  set(CURLOPT_URL, transfer.query.url.c_str());
#if LIBCURL_VERSION_NUM >= 0x075500
  set(CURLOPT_PROTOCOLS_STR, "http,https");
#else
  set(CURLOPT_PROTOCOLS, static_cast<long>(CURLPROTO_HTTP | CURLPROTO_HTTPS));
#endif
  set(CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
  set(CURLOPT_NOSIGNAL, 1L);
  set(CURLOPT_NOBODY, transfer.query.head ? 1L : 0L);
  set(CURLOPT_CONNECTTIMEOUT, kConnectSeconds);
  set(CURLOPT_LOW_SPEED_LIMIT, 1L);
  set(CURLOPT_LOW_SPEED_TIME, kSilentSeconds);
  set(CURLOPT_BUFFERSIZE, kBufferBytes);
  set(CURLOPT_USERAGENT, "millrace/" MILLRACE_VERSION);
  set(CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);
  for (const std::string& header : transfer.query.headers) {
    curl_slist* longer = curl_slist_append(transfer.headers, header.c_str());
    if (longer == nullptr) throw std::bad_alloc();
    transfer.headers = longer;
  }
  set(CURLOPT_HTTPHEADER, transfer.headers);
  set(CURLOPT_HEADERFUNCTION, &on_header);
  set(CURLOPT_HEADERDATA, &transfer);
  set(CURLOPT_WRITEFUNCTION, &on_data);
  set(CURLOPT_WRITEDATA, &transfer);
  if (const char* proxy = plain_proxy(transfer.query.url)) set(CURLOPT_PROXY, proxy);
  if (const char* authorities = std::getenv("SSL_CERT_FILE")) set(CURLOPT_CAINFO, authorities);
}

void finish(Transfer& transfer, CURLcode code) {
  HttpAnswer& answer = transfer.answer;
  long status = 0;
  curl_easy_getinfo(transfer.easy, CURLINFO_RESPONSE_CODE, &status);
  answer.status = static_cast<int>(status);
  if (code == CURLE_OK || transfer.stopped) return;
  answer.error = curl_easy_strerror(code);
  answer.unreachable = code == CURLE_COULDNT_RESOLVE_HOST || code == CURLE_COULDNT_RESOLVE_PROXY ||
                       code == CURLE_COULDNT_CONNECT || code == CURLE_PEER_FAILED_VERIFICATION ||
                       code == CURLE_SSL_CACERT_BADFILE;
}

class CurlClient final : public HttpClient {
 public:
  CurlClient() : multi_(curl_multi_init()) {
    if (multi_ == nullptr) throw_error(ErrorCode::kInternal, "libcurl cannot be started");
  }
  ~CurlClient() override {
    for (auto& [number, transfer] : transfers_) curl_multi_remove_handle(multi_, transfer->easy);
    transfers_.clear();
    curl_multi_cleanup(multi_);
  }
  CurlClient(const CurlClient&) = delete;
  CurlClient& operator=(const CurlClient&) = delete;

  int begin(HttpQuery query) override {
    auto transfer = std::make_unique<Transfer>();
    transfer->query = std::move(query);
    transfer->easy = curl_easy_init();
    if (transfer->easy == nullptr) throw std::bad_alloc();
    set_options(*transfer);
    curl_multi_add_handle(multi_, transfer->easy);
    transfers_[++last_] = std::move(transfer);
    return last_;
  }

  void stop(int number) override {
    const auto found = transfers_.find(number);
    if (found == transfers_.end()) return;
    curl_multi_remove_handle(multi_, found->second->easy);
    transfers_.erase(found);
  }

  std::vector<Finished> wait(int wait_ms) override {
    int running = 0;
    curl_multi_perform(multi_, &running);
    std::vector<Finished> finished = collect();
    if (!finished.empty()) return finished;
    curl_multi_poll(multi_, nullptr, 0, wait_ms, nullptr);
    curl_multi_perform(multi_, &running);
    return collect();
  }

 private:
  std::vector<Finished> collect() {
    std::vector<Finished> finished;
    int left = 0;
    while (const CURLMsg* message = curl_multi_info_read(multi_, &left)) {
      if (message->msg != CURLMSG_DONE) continue;
      const auto found = std::find_if(transfers_.begin(), transfers_.end(), [&](const auto& entry) {
        return entry.second->easy == message->easy_handle;
      });
      if (found == transfers_.end()) continue;
      const CURLcode code = message->data.result;
      curl_multi_remove_handle(multi_, found->second->easy);
      finish(*found->second, code);
      finished.push_back({found->first, std::move(found->second->answer)});
      transfers_.erase(found);
    }
    return finished;
  }

  CURLM* multi_;
  int last_ = 0;
  std::map<int, std::unique_ptr<Transfer>> transfers_;
};

}  // namespace

std::string why_no_network() { return {}; }

std::unique_ptr<HttpClient> make_http_client() {
  static std::once_flag once;  // libcurl's own state, for the whole process
  std::call_once(once, [] { curl_global_init(CURL_GLOBAL_DEFAULT); });
  return std::make_unique<CurlClient>();
}

}  // namespace millrace::hub
