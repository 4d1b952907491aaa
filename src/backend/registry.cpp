// The one place that knows which devices this build has.
#include "backend/backend.h"
#include "backend/cpu/cpu_backend.h"
#include "backend/cuda_backend.h"
#include "backend/reference/reference_backend.h"
#include "base/error.h"

namespace millrace {

std::unique_ptr<Backend> make_backend(std::string_view name, const BackendOptions& options) {
  if (name == "cpu") return make_cpu_backend(options);
  if (name == "reference") return make_reference_backend();
  if (name == "cuda") return make_cuda_backend(options);
  throw_error(ErrorCode::kBadInput, "device: found \"{}\", expected cpu, reference or cuda", name);
}

}  // namespace millrace
