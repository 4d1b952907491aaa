#include "kernels/cpu/quant/encode_dispatch.h"

#include <cstdlib>
#include <string_view>
#include <vector>

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

namespace millrace::quant {
namespace {

std::vector<const EncodeTable*> detect() {
  std::vector<const EncodeTable*> found{&kScalarEncoders};
#if defined(__aarch64__)
  const unsigned long capabilities = getauxval(AT_HWCAP);
  if (capabilities & HWCAP_ASIMD) found.push_back(&kNeonEncoders);
  if (capabilities & HWCAP_ASIMDDP) found.push_back(&kNeonDotprodEncoders);
#elif defined(__x86_64__)
  __builtin_cpu_init();  // asks the operating system too (xgetbv): wide registers must be saved
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;  // not a name clang 14 knows
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c)
    found.push_back(&kAvx2Encoders);
#endif
  return found;
}

}  // namespace

std::span<const EncodeTable* const> runnable_encoders() {
  static const std::vector<const EncodeTable*> found = detect();
  return found;
}

// A name that is no instruction set of this machine is refused where the cpu backend is opened.
const EncodeTable& best_encoders() {
  static const EncodeTable* const chosen = [] {
    const char* wanted = std::getenv("MILLRACE_ISA");
    if (wanted != nullptr) {
      for (const EncodeTable* table : runnable_encoders()) {
        if (std::string_view(wanted) == table->name) return table;
      }
    }
    return runnable_encoders().back();
  }();
  return *chosen;
}

}  // namespace millrace::quant
