// Picture: rows of red, green and blue, and how a file's bytes become one. What a file says of its size is
// looked at before anything is decoded.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace millrace::image {

struct Picture {
  int32_t width = 0, height = 0;
  std::vector<uint8_t> rgb;  // [height][width][3]
  uint8_t* at(int32_t x, int32_t y) { return rgb.data() + (int64_t{y} * width + x) * 3; }
  const uint8_t* at(int32_t x, int32_t y) const { return rgb.data() + (int64_t{y} * width + x) * 3; }
};

// What is decoded at most: a file of a few kilobytes can claim any size.
inline constexpr int32_t kMaxSide = 16384;
inline constexpr int64_t kMaxPixels = 40'000'000;

// A PNG or JPEG file; what is transparent keeps its colour, of an animation the first picture is taken, and
// one that says how it was held is turned. Throws Error{kBadInput} for another kind of file, a damaged or a
// too large one, Error{kUnsupported} in a build without the libraries.
Picture decode(std::string_view file);

// Throws Error{kBadInput} for a size that is not decoded.
void check_size(std::string_view kind, int64_t width, int64_t height);

// Triangles as wide as a pixel of the smaller of the two pictures, first along rows, then along columns, each
// rounded to 8 bits: what image libraries call bilinear with antialiasing. kCubic: Keys' curves (a = -0.5),
// two such pixels to each side. A side that has its size already is left as it is.
enum class Filter { kLinear, kCubic };
Picture resize(const Picture& from, int32_t width, int32_t height, Filter filter = Filter::kLinear);

}  // namespace millrace::image
