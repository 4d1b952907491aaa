// A GGUF file's header as far as the hub needs it: whether all of it has been fetched, and the architecture
// it names. io/ reads it for everything else, from a whole file.
#pragma once

#include <string>
#include <string_view>

namespace millrace::hub {

// Whether the whole header is in the bytes. One that makes no sense is called whole as well: the reader that
// opens the file says what is wrong with it.
bool has_whole_gguf_head(std::string_view bytes);

// general.architecture; empty when it is not among the first megabyte's keys.
std::string gguf_architecture(const std::string& path);

}  // namespace millrace::hub
