// The two kinds of files, each by the library made for it (codecs/), or a line that says there is none
// (no_codecs/).
#pragma once

#include <string_view>

#include "image/picture.h"

namespace millrace::image {

Picture decode_png(std::string_view file);
Picture decode_jpeg(std::string_view file);  // as it is stored, not turned

}  // namespace millrace::image
