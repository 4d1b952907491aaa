// Compression of a block's bytes. Numbers are split into planes first (all first bytes, then all second
// bytes): neighbours in the plane of the exponents are alike, mantissas are noise. zstd/ has the compressor;
// no_zstd/ stands in for it in a build without libzstd.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace millrace::kv {

bool can_compress();  // this build has a compressor
// Appends the compressed bytes to `to`.
void compress(std::span<const std::byte> from, std::vector<std::byte>& to);
// False when `from` is not exactly to.size() bytes compressed.
bool decompress(std::span<const std::byte> from, std::span<std::byte> to);

// to[p * n + i] = from[i * element + p] for the n whole elements; what is left over is copied. Same size.
void split_planes(std::span<const std::byte> from, size_t element, std::span<std::byte> to);
void join_planes(std::span<const std::byte> from, size_t element, std::span<std::byte> to);

}  // namespace millrace::kv
