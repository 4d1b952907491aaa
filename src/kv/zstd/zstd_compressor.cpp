// zstd at level 1: on KV planes higher levels cost much more time for a percent of the bytes.
#include <zstd.h>

#include <memory>

#include "base/check.h"
#include "kv/compressor.h"

namespace millrace::kv {
namespace {
constexpr int kLevel = 1;
}

bool can_compress() { return true; }

void compress(std::span<const std::byte> from, std::vector<std::byte>& to) {
  static thread_local const std::unique_ptr<ZSTD_CCtx, decltype(&ZSTD_freeCCtx)> context(ZSTD_createCCtx(),
                                                                                         ZSTD_freeCCtx);
  const size_t begin = to.size();
  to.resize(begin + ZSTD_compressBound(from.size()));
  const size_t bytes = ZSTD_compressCCtx(context.get(), to.data() + begin, to.size() - begin, from.data(),
                                         from.size(), kLevel);
  MILLRACE_CHECK(ZSTD_isError(bytes) == 0);  // the bound is enough
  to.resize(begin + bytes);
}

bool decompress(std::span<const std::byte> from, std::span<std::byte> to) {
  static thread_local const std::unique_ptr<ZSTD_DCtx, decltype(&ZSTD_freeDCtx)> context(ZSTD_createDCtx(),
                                                                                         ZSTD_freeDCtx);
  return ZSTD_decompressDCtx(context.get(), to.data(), to.size(), from.data(), from.size()) == to.size();
}

}  // namespace millrace::kv
