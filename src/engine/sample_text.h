// A short text to measure by when the user gives none.
#pragma once

namespace millrace {

// Some 900 tokens of English: stories, explanations, a letter, a recipe, a list, a little code and
// arithmetic.
extern const char* const kSampleText;

}  // namespace millrace
