#include "backend/cuda/tuned.h"

#include <algorithm>
#include <tuple>

#include "base/error.h"

namespace millrace::cuda {
namespace {

constexpr ItemsName kItems[] = {{WideItems::kDefault, "default"},
                                {WideItems::kWhole, "128x128"},
                                {WideItems::kHalf, "64x128"},
                                {WideItems::kSmall, "64x64"},
                                {WideItems::kFitted, "fitted"}};
constexpr RingName kRings[] = {
    {0, "default"}, {140000, "140 KB"}, {165000, "165 KB"}, {200000, "200 KB"}, {231000, "231 KB"}};
constexpr PackedFormat kFormats[] = {PackedFormat::kQ8, PackedFormat::kMx4, PackedFormat::kBf16};
constexpr int64_t kRows[] = {8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};

Tuned in_use;

template <class Names>
[[noreturn]] void throw_unknown(const TuneEntry& entry, const char* what, const std::string& found,
                                const Names& expected) {
  std::string names;
  for (const std::string_view name : expected) names += (names.empty() ? "" : ", ") + std::string(name);
  throw_error(ErrorCode::kBadInput, "the tuning of {}: {} \"{}\", expected {}", entry.what, what, found,
              names);
}

template <class Candidate>
const Candidate& find_choice(const TuneEntry& entry, std::span<const Candidate> all) {
  for (const Candidate& candidate : all) {
    if (candidate.name == entry.choice) return candidate;
  }
  std::vector<std::string_view> names;
  for (const Candidate& candidate : all) names.push_back(candidate.name);
  throw_unknown(entry, "choice", entry.choice, names);
}

PackedFormat format_of(const TuneEntry& entry) {
  std::vector<std::string_view> names;
  for (const PackedFormat format : kFormats) {
    if (format_name(format) == entry.key.format) return format;
    names.push_back(format_name(format));
  }
  throw_unknown(entry, "format", entry.key.format, names);
}

}  // namespace

std::span<const ItemsName> wide_candidates() { return kItems; }
std::span<const RingName> ring_candidates() { return kRings; }
std::span<const int64_t> tuned_rows() { return kRows; }

std::string_view format_name(PackedFormat format) {
  switch (format) {
    case PackedFormat::kQ8:
      return "q8";
    case PackedFormat::kMx4:
      return "mx4";
    case PackedFormat::kBf16:
      return "bf16";
    case PackedFormat::kNone:
      break;
  }
  return "none";
}

Tuned::Tuned(const TuneTable& table) {
  for (const TuneEntry& entry : table.entries) {
    const bool wide = entry.key.kernel == kWideKernel;
    if (!wide && entry.key.kernel != kStreamKernel) {
      throw_unknown(entry, "kernel", entry.key.kernel,
                    std::vector<std::string_view>{kWideKernel, kStreamKernel});
    }
    const PackedFormat format = format_of(entry);
    const uint32_t value = wide ? static_cast<uint32_t>(find_choice(entry, wide_candidates()).items)
                                : find_choice(entry, ring_candidates()).bytes;
    // A choice that cannot run the shape is of no timing: somebody wrote it.
    if (wide && !fits_items(static_cast<WideItems>(value), format)) {
      throw_error(ErrorCode::kBadInput, "the tuning of {}: choice \"{}\" is not for {}", entry.what,
                  entry.choice, entry.key.format);
    }
    entries_.push_back({wide, format, entry.key.outputs, entry.key.cols, entry.key.rows, value});
  }
  std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) { return a.rows < b.rows; });
}

const Tuned::Entry* Tuned::find(bool wide, PackedFormat format, int64_t outputs, int64_t cols,
                                int64_t rows) const {
  const Entry* largest = nullptr;
  for (const Entry& entry : entries_) {
    if (std::tie(entry.wide, entry.format, entry.outputs, entry.cols) !=
        std::tie(wide, format, outputs, cols))
      continue;
    largest = &entry;
    if (entry.rows >= rows) break;
  }
  return largest;
}

WideItems Tuned::items(PackedFormat format, int64_t outputs, int64_t cols, int64_t rows) const {
  const Entry* entry = find(true, format, outputs, cols, rows);
  return entry != nullptr ? static_cast<WideItems>(entry->value) : WideItems::kDefault;
}

uint32_t Tuned::ring_bytes(PackedFormat format, int64_t outputs, int64_t cols, int64_t rows) const {
  const Entry* entry = find(false, format, outputs, cols, rows);
  return entry != nullptr ? entry->value : 0;
}

void use_tuned(Tuned tuned) { in_use = std::move(tuned); }

WideItems tuned_items(const WideLinear& op) {
  if (in_use.empty() || op.num_parts == 0) return WideItems::kDefault;
  int64_t outputs = 0;
  for (int i = 0; i < op.num_parts; ++i) outputs += op.parts[i].w.rows;
  return in_use.items(op.parts[0].w.format, outputs, op.parts[0].w.cols, op.rows);
}

uint32_t tuned_ring_bytes(const StreamLinear& op) {
  if (in_use.empty() || op.num_parts == 0) return 0;
  int64_t outputs = 0;
  for (int i = 0; i < op.num_parts; ++i) outputs += op.parts[i].w.rows;
  return in_use.ring_bytes(op.parts[0].w.format, outputs, op.parts[0].w.cols, op.tokens);
}

}  // namespace millrace::cuda
