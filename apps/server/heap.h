// The process's heap beside large requests: what one of them took goes back to the system when it is
// answered.
#pragma once

namespace millrace::server {

// Once, before requests are read.
void keep_heap_small();

}  // namespace millrace::server
