#include <png.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "base/error.h"
#include "image/codecs.h"

namespace millrace::image {
namespace {

// The library leaves by longjmp: nothing here has a destructor of its own, and what it fills is the caller's.
// Samples are taken as they are, as image processors do: no gamma, no background, the upper half of 16 bits.
class PngReader {
 public:
  explicit PngReader(std::string_view file) : left_(file) {
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, fail, [](png_structp, png_const_charp) {});
    if (png_ != nullptr) info_ = png_create_info_struct(png_);
  }
  ~PngReader() { png_destroy_read_struct(&png_, &info_, nullptr); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  bool read_header() {
    if (info_ == nullptr || setjmp(png_jmpbuf(png_)) != 0) return false;
    png_set_read_fn(png_, this, read);
    png_set_user_limits(png_, PNG_UINT_31_MAX, PNG_UINT_31_MAX);  // check_size is what limits
    png_read_info(png_, info_);
    return true;
  }
  // Rows of RGB, of read_header's size.
  bool read_rows(uint8_t* rgb) {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    png_set_expand(png_);  // palettes, fewer than 8 bits
    png_set_strip_16(png_);
    png_set_strip_alpha(png_);
    png_set_gray_to_rgb(png_);
    const int passes = png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    if (png_get_rowbytes(png_, info_) != size_t{3} * width()) png_error(png_, "rows of another size");
    for (int pass = 0; pass < passes; ++pass) {
      for (uint32_t y = 0; y < height(); ++y) png_read_row(png_, rgb + size_t{3} * width() * y, nullptr);
    }
    return true;
  }
  uint32_t width() const { return png_get_image_width(png_, info_); }
  uint32_t height() const { return png_get_image_height(png_, info_); }
  std::string message() const { return message_.data(); }

 private:
  [[noreturn]] static void fail(png_structp png, png_const_charp message) {
    auto& kept = static_cast<PngReader*>(png_get_error_ptr(png))->message_;
    std::strncpy(kept.data(), message, kept.size() - 1);
    png_longjmp(png, 1);
  }
  static void read(png_structp png, png_bytep to, size_t count) {
    std::string_view& left = static_cast<PngReader*>(png_get_io_ptr(png))->left_;
    if (count > left.size()) png_error(png, "the file ends too soon");
    std::copy_n(left.begin(), count, to);
    left.remove_prefix(count);
  }

  std::string_view left_;
  std::array<char, 128> message_ = {};
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
};

}  // namespace

Picture decode_png(std::string_view file) {
  PngReader reader(file);
  const auto fail = [&] {
    throw_error(ErrorCode::kBadInput, "image: damaged PNG file: {}", reader.message());
  };
  if (!reader.read_header()) fail();
  check_size("PNG", reader.width(), reader.height());
  Picture out{static_cast<int32_t>(reader.width()), static_cast<int32_t>(reader.height()), {}};
  out.rgb.resize(size_t{3} * reader.width() * reader.height());
  if (!reader.read_rows(out.rgb.data())) fail();
  return out;
}

}  // namespace millrace::image
