// A short text to measure by when the user gives none.
#pragma once

namespace millrace::cli {

// Some 400 tokens of English: a story, an explanation, a list, a little code and arithmetic.
extern const char* const kSampleText;

}  // namespace millrace::cli
