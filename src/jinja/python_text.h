// Python's view of text over UTF-8: code point positions, white space, case, repr of strings and floats.
// Every function takes valid UTF-8; the boundaries (template source, variables) check it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.h"

namespace millrace::jinja {

bool is_valid_utf8(std::string_view text);
int64_t count_code_points(std::string_view text);
// Byte position of the code point `index`, which lies in [0, count_code_points].
size_t byte_offset(std::string_view text, int64_t index);
// The code point at byte `position`, which moves past it.
char32_t next_code_point(std::string_view text, size_t& position);
std::vector<std::string_view> split_code_points(std::string_view text);

bool is_space(char32_t c);
bool is_alpha(char32_t c);
bool is_digit(char32_t c);
bool is_decimal(char32_t c);
bool is_numeric(char32_t c);
bool is_upper(char32_t c);
bool is_lower(char32_t c);
bool is_printable(char32_t c);

// Python's strip family: `chars` empty pointer means white space.
std::string_view strip_left(std::string_view text, const std::string_view* chars);
std::string_view strip_right(std::string_view text, const std::string_view* chars);
// str.splitlines boundaries; with `keep_ends` each line carries its own.
std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends);

std::string to_upper(std::string_view text);
std::string to_lower(std::string_view text);
std::string to_title(std::string_view text);        // str.title
std::string to_capitalized(std::string_view text);  // str.capitalize
void append_upper(std::string& out, char32_t c);

// repr() of a str: Python's choice of quote, its escapes, unprintable code points as \x, \u or \U.
std::string repr_string(std::string_view text);
// repr() of a float: the shortest digits that read back, "1.0", "1e+16", "nan", "inf".
std::string repr_float(double value);

// & < > " ' as HTML writes them, as markupsafe does.
std::string escape_html(std::string_view text);

}  // namespace millrace::jinja
