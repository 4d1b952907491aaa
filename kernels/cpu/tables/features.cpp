#include "kernels/cpu/tables/features.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cerrno>

#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "kernels/cpu/tables/isa_tables.h"

namespace millrace::cpu {
namespace {

struct Detected {
  std::vector<const KernelTable*> tables{&scalar_table()};
  std::string refused;  // why a table is missing that the processor could run
};

#if defined(__x86_64__)

struct Cpuid {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Cpuid(unsigned leaf, unsigned subleaf) { __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d); }
};

// Tiles are 8 KiB of registers that Linux saves only for a process that has asked.
bool may_use_tiles(std::string& refused) {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kWanted = kBf16 | kTile | kInt8;
  if ((Cpuid(7, 0).d & kWanted) != kWanted) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));  // what the operating system saves at all
  constexpr unsigned kTileStates = 3u << 17;
  if ((low & kTileStates) != kTileStates) {
    refused = "amx: the processor has it, the operating system does not save its tiles";
    return false;
  }
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
    refused =
        fmt::format("amx: the processor has it, the kernel refused its tiles ({})", std::strerror(errno));
    return false;
  }
  return true;
}

void detect_x86(Detected& found) {
  __builtin_cpu_init();  // asks the operating system too (xgetbv): wide registers must be saved
  const bool f16c = (Cpuid(1, 0).c & bit_F16C) != 0;  // not a name clang 14 knows
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !f16c) return;
  found.tables.push_back(&avx2_table());
  constexpr unsigned kAvxVnni = 1u << 4;
  if ((Cpuid(7, 1).a & kAvxVnni) != 0) found.tables.push_back(&avx_vnni_table());
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return;
  }
  found.tables.push_back(&avx512_bw_table());
  if (!__builtin_cpu_supports("avx512vnni")) return;
  found.tables.push_back(&avx512_vnni_table());
  if (!__builtin_cpu_supports("avx512vbmi")) return;
  found.tables.push_back(&avx512_table());
  if (may_use_tiles(found.refused)) found.tables.push_back(&amx_table());
}

#endif

Detected detect() {
  Detected found;
#if defined(__aarch64__)
  const unsigned long capabilities = getauxval(AT_HWCAP);
  if (capabilities & HWCAP_ASIMD) found.tables.push_back(&neon_table());
  if (capabilities & HWCAP_ASIMDDP) found.tables.push_back(&neon_dotprod_table());
  if ((capabilities & HWCAP_ASIMDDP) && (getauxval(AT_HWCAP2) & HWCAP2_I8MM)) {
    found.tables.push_back(&neon_i8mm_table());
  }
#elif defined(__x86_64__)
  detect_x86(found);
#endif
  return found;
}

const Detected& detected() {
  static const Detected found = detect();
  return found;
}

}  // namespace

const std::vector<const KernelTable*>& runnable_tables() { return detected().tables; }

const KernelTable& choose_table(std::string_view isa) {
  if (isa.empty()) return *runnable_tables().back();
  std::string names;
  for (const KernelTable* table : runnable_tables()) {
    if (isa == table->name) return *table;
    names += names.empty() ? table->name : std::string(", ") + table->name;
  }
  if (!detected().refused.empty()) names += "; " + detected().refused;
  throw_error(ErrorCode::kBadInput, "MILLRACE_ISA: found \"{}\", this machine can run {}", isa, names);
}

std::string wanted_isa() {
  const char* value = std::getenv("MILLRACE_ISA");
  return value == nullptr ? "" : value;
}

}  // namespace millrace::cpu
