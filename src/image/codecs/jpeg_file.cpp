#include <csetjmp>
#include <cstddef>
#include <cstdio>
// libjpeg's header needs FILE and size_t to be there.
#include <jpeglib.h>
// And this one wants the first.
#include <jerror.h>

#include <array>
#include <string>

#include "base/error.h"
#include "image/codecs.h"

namespace millrace::image {
namespace {

struct Failure {
  jpeg_error_mgr manager;  // first: the library gives a pointer to it
  std::jmp_buf leave;
  std::array<char, JMSG_LENGTH_MAX> message;
};

[[noreturn]] void leave(j_common_ptr info) {
  auto* failure = reinterpret_cast<Failure*>(info->err);
  info->err->format_message(info, failure->message.data());
  std::longjmp(failure->leave, 1);
}

// The library leaves by longjmp: nothing here has a destructor, and what it fills is the caller's.
class Decoder {
 public:
  Decoder() = default;
  ~Decoder() { jpeg_destroy_decompress(&info_); }
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  bool read_header(std::string_view file) {
    info_.err = jpeg_std_error(&failure_.manager);
    failure_.manager.error_exit = leave;
    failure_.manager.emit_message = [](j_common_ptr info, int level) {  // of warnings one counts
      if (level < 0 && info->err->msg_code == JWRN_JPEG_EOF) leave(info);
    };
    if (setjmp(failure_.leave) != 0) return false;
    jpeg_create_decompress(&info_);
    jpeg_mem_src(&info_, reinterpret_cast<const unsigned char*>(file.data()), file.size());
    jpeg_read_header(&info_, TRUE);
    return true;
  }
  bool read_rows(uint8_t* rgb) {
    if (setjmp(failure_.leave) != 0) return false;
    info_.out_color_space = JCS_RGB;
    info_.dct_method = JDCT_ISLOW;
    jpeg_start_decompress(&info_);
    while (info_.output_scanline < info_.output_height) {
      JSAMPROW row = rgb + size_t{info_.output_scanline} * info_.output_width * 3;
      jpeg_read_scanlines(&info_, &row, 1);
    }
    jpeg_finish_decompress(&info_);
    return true;
  }
  const jpeg_decompress_struct& info() const { return info_; }
  std::string message() const { return failure_.message.data(); }

 private:
  jpeg_decompress_struct info_ = {};
  Failure failure_ = {};
};

}  // namespace

Picture decode_jpeg(std::string_view file) {
  Decoder decoder;
  const auto fail = [&] {
    throw_error(ErrorCode::kBadInput, "image: damaged JPEG file: {}", decoder.message());
  };
  if (!decoder.read_header(file)) fail();
  check_size("JPEG", decoder.info().image_width, decoder.info().image_height);
  if (decoder.info().num_components != 1 && decoder.info().num_components != 3) {
    throw_error(ErrorCode::kBadInput, "image: found a JPEG file of {} components, expected 1 or 3",
                decoder.info().num_components);
  }
  Picture out{static_cast<int32_t>(decoder.info().image_width),
              static_cast<int32_t>(decoder.info().image_height),
              {}};
  out.rgb.resize(size_t{decoder.info().image_width} * decoder.info().image_height * 3);
  if (!decoder.read_rows(out.rgb.data())) fail();
  return out;
}

}  // namespace millrace::image
