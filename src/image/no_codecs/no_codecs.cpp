#include "base/error.h"
#include "image/codecs.h"

namespace millrace::image {
namespace {

[[noreturn]] void refuse(std::string_view library) {
  throw_error(ErrorCode::kUnsupported, "image: this build has no {}: install it and build again", library);
}

}  // namespace

Picture decode_png(std::string_view) { refuse("libpng"); }
Picture decode_jpeg(std::string_view) { refuse("libjpeg-turbo"); }

}  // namespace millrace::image
