#include "engine/lock_memory.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace millrace {

void lock_memory() {
  if (::mlockall(MCL_CURRENT | MCL_FUTURE) == 0) return;
  const int reason = errno;
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  throw_error(ErrorCode::kNoMemory,
              "--lock: cannot lock memory: {}; found a limit of {} bytes, expected room for the whole model "
              "(ulimit -l)",
              std::strerror(reason), limit.rlim_cur);
}

}  // namespace millrace
