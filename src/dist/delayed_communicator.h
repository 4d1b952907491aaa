// A communicator that makes another one a slow link, for ranks of one machine (they share its clock): a
// message is there `latency_s` after the sender's line, of bytes_per_s, has put it out. Both directions have
// a line of their own.
#pragma once

#include <optional>
#include <string_view>

#include "dist/communicator.h"

namespace millrace::dist {

struct LinkDelay {
  double latency_s = 0;
  double bytes_per_s = 0;  // 0: no limit
};

std::unique_ptr<Communicator> make_delayed(std::unique_ptr<Communicator> inner, const LinkDelay& delay);

// "50,1000": 50 microseconds and 1,000 Mbit/s; 0 Mbit/s: no limit. None for an empty text; throws Error for
// another one, by the name of what said so.
std::optional<LinkDelay> parse_link_delay(std::string_view name, std::string_view text);

}  // namespace millrace::dist
