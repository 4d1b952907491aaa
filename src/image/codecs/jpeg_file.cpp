#include <csetjmp>
#include <cstddef>
#include <cstdio>
// libjpeg's header needs FILE and size_t to be there.
#include <jpeglib.h>
// And this one wants the first.
#include <jerror.h>

#include <array>
#include <string>
#include <vector>

#include "base/error.h"
#include "image/codecs.h"

namespace millrace::image {
namespace {

constexpr int kInks = 4;
// A small file can have thousands of scans, each over the whole picture.
constexpr int kMostScans = 500;

// Of a row of cyan, magenta, yellow and black, each 255 where there is none of it, as all files of four
// components are taken to be. A shade is what of its own ink and of black is left.
void inks_to_rgb(const uint8_t* row, int64_t width, uint8_t* rgb) {
  for (int64_t x = 0; x < width; ++x, row += kInks, rgb += 3) {
    for (int c = 0; c < 3; ++c) {
      const int product = (255 - row[c]) * row[3] + 128;
      rgb[c] = static_cast<uint8_t>(row[3] - ((product + (product >> 8)) >> 8));  // divided by 255, rounded
    }
  }
}

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

void limit_scans(j_common_ptr info) {
  if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number <= kMostScans) return;
  auto* failure = reinterpret_cast<Failure*>(info->err);
  std::snprintf(failure->message.data(), failure->message.size(), "more than %d scans", kMostScans);
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
    progress_.progress_monitor = limit_scans;
    info_.progress = &progress_;
    jpeg_mem_src(&info_, reinterpret_cast<const unsigned char*>(file.data()), file.size());
    jpeg_read_header(&info_, TRUE);
    return true;
  }
  bool has_inks() const { return info_.num_components == kInks; }
  // inks: a row of them, where has_inks().
  bool read_rows(uint8_t* rgb, uint8_t* inks) {
    if (setjmp(failure_.leave) != 0) return false;
    info_.out_color_space = has_inks() ? JCS_CMYK : JCS_RGB;
    info_.dct_method = JDCT_ISLOW;
    jpeg_start_decompress(&info_);
    while (info_.output_scanline < info_.output_height) {
      uint8_t* const to = rgb + size_t{info_.output_scanline} * info_.output_width * 3;
      JSAMPROW row = has_inks() ? inks : to;
      if (jpeg_read_scanlines(&info_, &row, 1) == 1 && has_inks()) inks_to_rgb(inks, info_.output_width, to);
    }
    jpeg_finish_decompress(&info_);
    return true;
  }
  const jpeg_decompress_struct& info() const { return info_; }
  std::string message() const { return failure_.message.data(); }

 private:
  jpeg_decompress_struct info_ = {};
  jpeg_progress_mgr progress_ = {};
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
  if (decoder.info().num_components != 1 && decoder.info().num_components != 3 && !decoder.has_inks()) {
    throw_error(ErrorCode::kBadInput, "image: found a JPEG file of {} components, expected 1, 3 or 4",
                decoder.info().num_components);
  }
  Picture out{static_cast<int32_t>(decoder.info().image_width),
              static_cast<int32_t>(decoder.info().image_height),
              {}};
  out.rgb.resize(size_t{decoder.info().image_width} * decoder.info().image_height * 3);
  std::vector<uint8_t> inks(decoder.has_inks() ? size_t{kInks} * decoder.info().image_width : 0);
  if (!decoder.read_rows(out.rgb.data(), inks.data())) fail();
  return out;
}

}  // namespace millrace::image
