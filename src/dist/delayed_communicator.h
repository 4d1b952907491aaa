// A communicator that makes another one a slow link, for ranks of one machine (they share its clock): a
// message is there `latency_s` after the sender's line, of bytes_per_s, has put it out. Both directions have
// a line of their own.
#pragma once

#include "dist/communicator.h"

namespace millrace::dist {

struct LinkDelay {
  double latency_s = 0;
  double bytes_per_s = 0;  // 0: no limit
};

std::unique_ptr<Communicator> make_delayed(std::unique_ptr<Communicator> inner, const LinkDelay& delay);

}  // namespace millrace::dist
