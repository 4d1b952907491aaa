#include "image/picture.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "image/codecs.h"

namespace millrace::image {
namespace {

constexpr std::string_view kPng("\x89PNG\r\n\x1a\n", 8), kJpeg("\xff\xd8\xff", 3);

// The orientation that the EXIF data of a file tells, 1 to 8; 1 where it tells none.
class Exif {
 public:
  explicit Exif(std::string_view file) : file_(file) {}

  int orientation() const { return file_.starts_with(kPng) ? of_png() : of_jpeg(); }

 private:
  int of_png() const {
    size_t at = kPng.size();  // chunks: length of the data, kind, data, checksum
    while (at + 12 <= file_.size()) {
      const size_t length = number(at, 4, false), left = file_.size() - at - 12;
      if (length > left) break;
      if (file_.substr(at + 4, 4) == "eXIf") return Exif(file_.substr(at + 8, length)).tiff();
      at += 12 + length;
    }
    return 1;
  }
  int of_jpeg() const {
    constexpr std::string_view kExif("Exif\0\0", 6);
    size_t at = 2;  // segments: FF, kind, length of two bytes with itself
    while (at + 4 <= file_.size() && byte(at) == 0xff) {
      const uint32_t kind = byte(at + 1), length = byte(at + 2) << 8 | byte(at + 3);
      if (kind == 0xda || length < 2) break;  // the picture itself
      const std::string_view body = file_.substr(at + 4, length - 2);
      if (kind == 0xe1 && body.starts_with(kExif)) return Exif(body.substr(kExif.size())).tiff();
      at += 2 + length;
    }
    return 1;
  }
  uint32_t byte(size_t at) const { return static_cast<unsigned char>(file_[at]); }
  uint32_t number(size_t at, size_t bytes, bool little) const {
    if (at > file_.size() || file_.size() - at < bytes) return 0;
    uint32_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value = value << 8 | byte(little ? at + bytes - 1 - i : at + i);
    return value;
  }
  int tiff() const {
    const bool little = file_.starts_with("II");
    if (!little && !file_.starts_with("MM")) return 1;
    const size_t directory = number(4, 4, little);
    const uint32_t entries = number(directory, 2, little);
    for (size_t i = 0; i < entries; ++i) {
      const size_t entry = directory + 2 + 12 * i;
      if (number(entry, 2, little) != 0x0112) continue;
      const uint32_t value = number(entry + 8, 2, little);
      return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
    }
    return 1;
  }
  std::string_view file_;
};

// As a viewer shows it. Orientations 5 to 8 exchange rows and columns; then 2, 3, 6 and 7 mirror left and
// right, 3, 4, 7 and 8 top and bottom.
Picture turned(Picture from, int orientation) {
  if (orientation == 1) return from;
  const bool across = orientation >= 5;
  const bool flip_x = orientation == 2 || orientation == 3 || orientation == 6 || orientation == 7;
  const bool flip_y = orientation == 3 || orientation == 4 || orientation == 7 || orientation == 8;
  Picture out{across ? from.height : from.width, across ? from.width : from.height, {}};
  out.rgb.resize(from.rgb.size());
  for (int32_t y = 0; y < out.height; ++y) {
    for (int32_t x = 0; x < out.width; ++x) {
      const int32_t u = flip_x ? out.width - 1 - x : x, v = flip_y ? out.height - 1 - y : y;
      std::copy_n(across ? from.at(v, u) : from.at(u, v), 3, out.at(x, y));
    }
  }
  return out;
}

// Weights of the pixels [first, first + size) of which one new pixel is made.
struct Taps {
  int32_t first = 0;
  std::vector<double> weights;
};

double weight_at(Filter filter, double x) {
  x = std::abs(x);
  if (filter == Filter::kLinear) return std::max(0.0, 1.0 - x);
  constexpr double kA = -0.5;
  if (x < 1.0) return ((kA + 2.0) * x - (kA + 3.0)) * x * x + 1;
  return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * kA : 0.0;
}

std::vector<Taps> taps_of(int32_t from, int32_t to, Filter filter) {
  const double step = static_cast<double>(from) / to, scale = std::max(1.0, step);
  const double width = filter == Filter::kCubic ? 2.0 * scale : scale;
  std::vector<Taps> all(static_cast<size_t>(to));
  for (int32_t i = 0; i < to; ++i) {
    const double centre = (i + 0.5) * step;
    const int32_t first = std::max(0, static_cast<int32_t>(centre - width + 0.5));
    const int32_t last = std::min(from, static_cast<int32_t>(centre + width + 0.5));
    Taps& taps = all[static_cast<size_t>(i)];
    taps.first = first;
    double sum = 0.0;
    for (int32_t x = first; x < last; ++x) {
      taps.weights.push_back(weight_at(filter, (x - centre + 0.5) / scale));
      sum += taps.weights.back();
    }
    for (double& weight : taps.weights) weight /= sum;
  }
  return all;
}

uint8_t rounded(double value) { return static_cast<uint8_t>(std::clamp(value + 0.5, 0.0, 255.0)); }

}  // namespace

void check_size(std::string_view kind, int64_t width, int64_t height) {
  if (width >= 1 && height >= 1 && width <= kMaxSide && height <= kMaxSide && width * height <= kMaxPixels)
    return;
  throw_error(ErrorCode::kBadInput,
              "image: found a {} file of {} x {} pixels, expected at most {} a side and {} in all", kind,
              width, height, kMaxSide, kMaxPixels);
}

Picture decode(std::string_view file) {
  if (!file.starts_with(kPng) && !file.starts_with(kJpeg))
    throw_error(ErrorCode::kBadInput, "image: found neither a PNG nor a JPEG file, expected one of them");
  return turned(file.starts_with(kPng) ? decode_png(file) : decode_jpeg(file), Exif(file).orientation());
}

Picture resize(const Picture& from, int32_t width, int32_t height, Filter filter) {
  Picture across{width, from.height, {}};
  across.rgb.resize(size_t{3} * static_cast<size_t>(width) * static_cast<size_t>(from.height));
  const std::vector<Taps> columns = taps_of(from.width, width, filter),
                          rows = taps_of(from.height, height, filter);
  for (int32_t y = 0; y < from.height; ++y) {
    for (int32_t x = 0; x < width; ++x) {
      const Taps& taps = columns[static_cast<size_t>(x)];
      double sum[3] = {};
      for (size_t k = 0; k < taps.weights.size(); ++k) {
        const uint8_t* pixel = from.at(taps.first + static_cast<int32_t>(k), y);
        for (int c = 0; c < 3; ++c) sum[c] += taps.weights[k] * pixel[c];
      }
      for (int c = 0; c < 3; ++c) across.at(x, y)[c] = rounded(sum[c]);
    }
  }
  Picture out{width, height, {}};
  out.rgb.resize(size_t{3} * static_cast<size_t>(width) * static_cast<size_t>(height));
  std::vector<double> sums(size_t{3} * static_cast<size_t>(width));
  for (int32_t y = 0; y < height; ++y) {
    std::fill(sums.begin(), sums.end(), 0.0);
    const Taps& taps = rows[static_cast<size_t>(y)];
    for (size_t k = 0; k < taps.weights.size(); ++k) {
      const uint8_t* row = across.at(0, taps.first + static_cast<int32_t>(k));
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += taps.weights[k] * row[i];
    }
    std::transform(sums.begin(), sums.end(), out.at(0, y), rounded);
  }
  return out;
}

}  // namespace millrace::image
