#include "admission.h"

#include <algorithm>

#include "addresses.h"
#include "api_error.h"

namespace millrace::server {
namespace {

constexpr double kWrongKeysPerMinute = 60;

std::shared_ptr<const Keys> read_keys(const std::string& path) {
  return std::make_shared<Keys>(path.empty() ? Keys() : Keys::from_file(path));
}

}  // namespace

Admission::Admission(const ServerOptions& options)
    : options_(options), sites_(options), keys_(read_keys(options.keys_file)) {}

std::shared_ptr<const Keys> Admission::keys() const {
  const std::lock_guard lock(mutex_);
  return keys_;
}

size_t Admission::reload_keys() {
  auto fresh = read_keys(options_.keys_file);
  const size_t count = fresh->size();
  const std::lock_guard lock(mutex_);
  keys_ = std::move(fresh);
  return count;
}

// The last address of the list is the one that the proxy saw; those before it are whatever the client wrote.
void Admission::see_through_proxy(const HttpRequest& head, Client& client) const {
  if (!options_.trust_proxy || !is_private_address(client.remote)) return;
  for (auto field = head.headers.rbegin(); field != head.headers.rend(); ++field) {
    if (!same_word(field->first, "x-forwarded-for")) continue;
    std::string_view last = field->second;
    last = last.substr(last.rfind(',') + 1);
    while (last.starts_with(' ')) last.remove_prefix(1);
    if (is_address(last)) client.remote = last;
    return;
  }
}

std::optional<HttpResponse> Admission::refuse_site(const HttpRequest& head) const {
  // A page that has been pointed here has no key: with keys it is refused for that.
  if (!keys()->in_use()) {
    if (auto refusal = sites_.refuse_host(head)) return refusal;
  }
  return sites_.refuse_origin(head);
}

std::optional<HttpResponse> Admission::refuse_key(const HttpRequest& head, Client& client) {
  const std::shared_ptr<const Keys> all = keys();
  client.limits = {.requests_per_minute = options_.rate_per_minute,
                   .tokens_per_minute = options_.tokens_per_minute,
                   .running = options_.max_requests_per_client,
                   .max_priority = options_.max_priority};
  if (!all->in_use()) return std::nullopt;
  const Keys::Key* key = all->check(head.header("authorization"));
  if (key == nullptr) key = all->find(head.header("x-api-key"));  // how Anthropic's clients say it
  if (key == nullptr) {
    // Who guesses is told to wait; whoever has a key is never kept waiting by others of the same address.
    const auto verdict = wrong_keys_.take(address_group(client.remote), kWrongKeysPerMinute, 1);
    if (!verdict.allowed) {
      ApiError error(429, "too many requests without a valid API key from this address", "",
                     "rate_limit_exceeded");
      error.retry_after_s = std::max(1, static_cast<int>(verdict.wait_s + 1));
      return error_response(error);
    }
    return error_response(
        {401,
         "no valid API key was given: expected the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
         "", "invalid_api_key"});
  }
  client.key_name = key->name;
  client.limits = key->limits(client.limits);
  return std::nullopt;
}

std::optional<HttpResponse> Admission::refuse_amount(Client& client) {
  const std::string who = client.key_name.empty() ? address_group(client.remote) : client.key_name;
  ClientTable::Entry entry = clients_.enter(who, client.limits);
  if (entry.refusal) return std::move(entry.refusal);
  client.use = std::move(entry.use);
  client.headers = std::move(entry.headers);
  return std::nullopt;
}

}  // namespace millrace::server
