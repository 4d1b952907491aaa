// A build without libzstd: blocks are stored as they are, and files that need it are dropped as unreadable.
#include "base/check.h"
#include "kv/compressor.h"

namespace millrace::kv {

bool can_compress() { return false; }
void compress(std::span<const std::byte>, std::vector<std::byte>&) { MILLRACE_CHECK(false); }
bool decompress(std::span<const std::byte>, std::span<std::byte>) { return false; }

}  // namespace millrace::kv
