// SiteRules: from which pages a browser may talk to this server. A page anywhere can make a browser send
// requests to this machine: under a name of its own that it points here (told by Host), or across origins
// (told by Origin), as long as the body is one that browsers send without asking first (told by
// Content-Type).
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "http.h"
#include "options.h"

namespace millrace::server {

class SiteRules {
 public:
  explicit SiteRules(const ServerOptions& options);

  // Each says what the client is told, or nothing when the request may go on.
  std::optional<HttpResponse> refuse_host(const HttpRequest& head) const;
  std::optional<HttpResponse> refuse_origin(const HttpRequest& head) const;
  static std::optional<HttpResponse> refuse_content_type(const HttpRequest& head);

  bool allows_host(std::string_view host) const;  // name, name:port, [::1]:port
  bool allows_origin(std::string_view origin, std::string_view host) const;

 private:
  bool is_named(std::string_view name) const;  // with --allow-host

  const std::vector<std::string> names_;
  const std::string bound_, cors_origin_;
  bool any_ = false, bound_to_all_ = false;
};

}  // namespace millrace::server
