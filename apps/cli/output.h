// Standard output and error without surprises: every byte is written or the failure is reported (a full disk
// behind a redirection is an Error, a closed pipe is ClosedOutput), and nothing stays in a buffer.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace millrace::cli {

struct ClosedOutput {};  // thrown through a command, to main

void write_stdout(std::string_view text);
void write_stderr(std::string_view text);  // failures are ignored: there is nowhere to report them
// One object, indented, and a newline.
void write_json(const nlohmann::ordered_json& value);
bool stderr_is_terminal();

std::string human_bytes(size_t bytes);  // "12.1 GiB"
std::string human_count(size_t count);  // "1,234,567"

// Throws Error{kIo} when the disk that `path` will lie on has less than this left.
void check_disk_space(const std::string& path, size_t bytes);

}  // namespace millrace::cli
