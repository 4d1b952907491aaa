#include "site_rules.h"

#include <fmt/core.h>

#include <algorithm>

#include "addresses.h"
#include "api_error.h"

namespace millrace::server {
namespace {

// name:80 -> name, [::1]:80 -> ::1
std::string_view without_port(std::string_view authority) {
  if (authority.starts_with('[')) {
    const size_t end = authority.find(']');
    return end == std::string_view::npos ? std::string_view() : authority.substr(1, end - 1);
  }
  return authority.substr(0, authority.find(':'));
}

std::string_view without_scheme(std::string_view origin) {
  const size_t scheme = origin.find("://");
  return scheme == std::string_view::npos ? std::string_view() : origin.substr(scheme + 3);
}

}  // namespace

SiteRules::SiteRules(const ServerOptions& options)
    : names_(options.allow_hosts),
      bound_(options.host),
      cors_origin_(options.cors_origin),
      any_(std::find(names_.begin(), names_.end(), "*") != names_.end()),
      bound_to_all_(is_any_address(options.host)) {}

bool SiteRules::is_named(std::string_view name) const {
  return any_ || std::any_of(names_.begin(), names_.end(),
                             [&](const std::string& allowed) { return same_word(allowed, name); });
}

bool SiteRules::allows_host(std::string_view host) const {
  const std::string_view name = without_port(host);
  if (same_word(name, "localhost") || is_loopback_address(name) || same_word(name, bound_)) return true;
  // An address cannot be pointed elsewhere, as a name can.
  return (bound_to_all_ && is_address(name)) || is_named(name);
}

bool SiteRules::allows_origin(std::string_view origin, std::string_view host) const {
  if (cors_origin_ == "*" || (!cors_origin_.empty() && same_word(origin, cors_origin_))) return true;
  const std::string_view authority = without_scheme(origin);
  if (authority.empty()) return false;
  return same_word(authority, host) || (!any_ && is_named(without_port(authority)));
}

std::optional<HttpResponse> SiteRules::refuse_host(const HttpRequest& head) const {
  const std::string_view host = head.header("host");
  if (host.empty() || allows_host(host)) return std::nullopt;  // without one it is no browser
  return error_response({403,
                         fmt::format("this server does not go by the name '{0}': start it with --allow-host "
                                     "{0} (or * for any name), or with --keys",
                                     without_port(host).substr(0, 100)),
                         "", "host_not_allowed"});
}

std::optional<HttpResponse> SiteRules::refuse_origin(const HttpRequest& head) const {
  const std::string_view origin = head.header("origin");
  if (origin.empty() || head.method == "GET" || head.method == "HEAD" || head.method == "OPTIONS")
    return std::nullopt;
  if (allows_origin(origin, head.header("host"))) return std::nullopt;
  return error_response(
      {403,
       fmt::format("pages of the origin '{0}' may not ask this server: start it with --cors {0}",
                   origin.substr(0, 100)),
       "", "origin_not_allowed"});
}

std::optional<HttpResponse> SiteRules::refuse_content_type(const HttpRequest& head) {
  if (!head.has_body) return std::nullopt;
  std::string_view type = head.header("content-type");
  const std::string_view found = type;
  type = type.substr(0, type.find(';'));
  while (type.ends_with(' ')) type.remove_suffix(1);
  if (same_word(type, "application/json")) return std::nullopt;
  return error_response(
      {415,
       fmt::format("found a body of {}, expected the header 'Content-Type: application/json' "
                   "(curl: -H 'content-type: application/json')",
                   found.empty() ? "no type" : fmt::format("the type '{}'", found.substr(0, 100))),
       "", "unsupported_media_type"});
}

}  // namespace millrace::server
