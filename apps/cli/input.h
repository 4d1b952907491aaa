// What a user gives by file, by standard input or as a list.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace millrace::cli {

// The bytes of a file, or of standard input for "-".
std::string read_input(const std::string& path);
// "1,2,3", "1 2 3" or "@file" holding such a list. Throws Error naming the piece that is no token id.
std::vector<int32_t> parse_tokens(const std::string& text);

}  // namespace millrace::cli
