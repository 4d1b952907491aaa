// The process's heap beside large requests: what one of them took goes back to the system when it is
// answered, instead of staying with whichever thread read it.
#pragma once

namespace millrace::server {

// Once, before requests are read.
void keep_heap_small();
// After something large was freed.
void give_heap_back();

}  // namespace millrace::server
