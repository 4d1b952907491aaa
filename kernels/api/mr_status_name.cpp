// mr_status_name(), of the library and of the small one that `make fa2-opt` builds.
#include "millrace/kernels/device.h"

extern "C" const char* mr_status_name(mr_status status) {
  switch (status) {
    case MR_OK:
      return "MR_OK";
    case MR_ERROR_INVALID:
      return "MR_ERROR_INVALID";
    case MR_ERROR_UNSUPPORTED:
      return "MR_ERROR_UNSUPPORTED";
    case MR_ERROR_NO_MEMORY:
      return "MR_ERROR_NO_MEMORY";
    case MR_ERROR_DEVICE:
      return "MR_ERROR_DEVICE";
    case MR_ERROR_INTERNAL:
      return "MR_ERROR_INTERNAL";
  }
  return "unknown status";
}
