// The communicator between threads of one process: messages are copied into the receiver's mailbox, so send
// never waits. A rank whose communicator is destroyed has left: who waits for it gets an Error.
#pragma once

#include "dist/communicator.h"

namespace millrace::dist {

// One communicator per rank, for a thread each.
std::vector<std::unique_ptr<Communicator>> make_local_group(int ranks);

}  // namespace millrace::dist
