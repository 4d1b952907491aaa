#include <png.h>

#include <string>

#include "base/error.h"
#include "image/codecs.h"

namespace millrace::image {

Picture decode_png(std::string_view file) {
  png_image header = {};
  header.version = PNG_IMAGE_VERSION;
  struct Guard {
    png_image* image;
    ~Guard() { png_image_free(image); }
  } guard{&header};
  const auto check = [&](int done) {
    if (done == 0 || (header.warning_or_error & PNG_IMAGE_ERROR) != 0)
      throw_error(ErrorCode::kBadInput, "image: damaged PNG file: {}", std::string(header.message));
  };
  check(png_image_begin_read_from_memory(&header, file.data(), file.size()));
  check_size("PNG", header.width, header.height);
  header.format = PNG_FORMAT_RGBA;  // asked for RGB it would lay the picture over a background
  std::vector<uint8_t> rgba(PNG_IMAGE_SIZE(header));
  check(png_image_finish_read(&header, nullptr, rgba.data(), 0, nullptr));
  Picture out{static_cast<int32_t>(header.width), static_cast<int32_t>(header.height), {}};
  out.rgb.reserve(rgba.size() / 4 * 3);
  for (size_t i = 0; i < rgba.size(); i += 4) {
    out.rgb.insert(out.rgb.end(), rgba.begin() + static_cast<ptrdiff_t>(i),
                   rgba.begin() + static_cast<ptrdiff_t>(i) + 3);
  }
  return out;
}

}  // namespace millrace::image
