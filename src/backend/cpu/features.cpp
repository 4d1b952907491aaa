#include "backend/cpu/features.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>

#include "backend/cpu/tables.h"
#include "base/error.h"

namespace millrace::cpu {
namespace {

std::vector<const KernelTable*> detect() {
  std::vector<const KernelTable*> tables{&kScalarTable};
#if defined(__aarch64__)
  const unsigned long capabilities = getauxval(AT_HWCAP);
  if (capabilities & HWCAP_ASIMD) tables.push_back(&kNeonTable);
  if (capabilities & HWCAP_ASIMDDP) tables.push_back(&kNeonDotprodTable);
  if ((capabilities & HWCAP_ASIMDDP) && (getauxval(AT_HWCAP2) & HWCAP2_I8MM))
    tables.push_back(&kNeonI8mmTable);
#elif defined(__x86_64__)
  __builtin_cpu_init();  // asks the operating system too (xgetbv): wide registers must be saved
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;  // not a name clang 14 knows
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c) {
    tables.push_back(&kAvx2Table);
  }
#endif
  return tables;
}

}  // namespace

const std::vector<const KernelTable*>& runnable_tables() {
  static const std::vector<const KernelTable*> tables = detect();
  return tables;
}

const KernelTable& choose_table(std::string_view isa) {
  if (isa.empty()) return *runnable_tables().back();
  std::string names;
  for (const KernelTable* table : runnable_tables()) {
    if (isa == table->name) return *table;
    names += names.empty() ? table->name : std::string(", ") + table->name;
  }
  throw_error(ErrorCode::kBadInput, "MILLRACE_ISA: found \"{}\", this machine can run {}", isa, names);
}

std::string wanted_isa() {
  const char* value = std::getenv("MILLRACE_ISA");
  return value == nullptr ? "" : value;
}

}  // namespace millrace::cpu
