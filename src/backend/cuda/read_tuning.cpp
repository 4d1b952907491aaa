#include "backend/cuda/read_tuning.h"

#include <span>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "kernels/cuda/gemm/gemm.h"

namespace millrace::cuda {
namespace {

constexpr PackedFormat kFormats[] = {PackedFormat::kQ8, PackedFormat::kMxfp4, PackedFormat::kBf16,
                                     PackedFormat::kQ4, PackedFormat::kQ5,    PackedFormat::kQ6};

[[noreturn]] void throw_unknown(const TuningEntry& entry, const char* what, const std::string& found,
                                const std::vector<std::string_view>& expected) {
  std::string names;
  for (const std::string_view name : expected) names += (names.empty() ? "" : ", ") + std::string(name);
  throw_error(ErrorCode::kBadInput, "the tuning of {}: {} \"{}\", expected {}", entry.what, what, found,
              names);
}

// The one of `all` whose name is `wanted`.
template <class Range, class Name>
auto find_name(const TuningEntry& entry, const char* what, const std::string& wanted, const Range& all,
               const Name& name_of) {
  std::vector<std::string_view> names;
  for (const auto& one : all) {
    if (name_of(one) == wanted) return one;
    names.push_back(name_of(one));
  }
  throw_unknown(entry, what, wanted, names);
}

Tuning::Entry read_entry(const TuningEntry& entry) {
  const TunedKernel kernel = find_name(entry, "kernel", entry.key.kernel, kTunedKernels, kernel_name);
  const PackedFormat format = find_name(entry, "format", entry.key.format, kFormats, format_name);
  const auto choice = [&](const auto& all) {
    return find_name(entry, "choice", entry.choice, all, [](const auto& one) { return one.name; });
  };
  uint32_t value = 0;
  if (kernel == TunedKernel::kGemm) {
    const GemmTile tile = choice(gemm_candidates()).tile;
    // A choice that cannot run the shape is of no timing: somebody wrote it.
    if (!supports_tile(tile, format)) {
      throw_error(ErrorCode::kBadInput, "the tuning of {}: choice \"{}\" is not for {}", entry.what,
                  entry.choice, entry.key.format);
    }
    value = static_cast<uint32_t>(tile);
  } else {
    value = choice(ring_candidates()).bytes;
  }
  return {kernel, format, entry.key.outputs, entry.key.cols, entry.key.rows, value};
}

}  // namespace

Tuning read_tuning(const TuningTable& table) {
  std::vector<Tuning::Entry> entries;
  for (const TuningEntry& entry : table.entries) entries.push_back(read_entry(entry));
  return Tuning(std::move(entries));
}

}  // namespace millrace::cuda
