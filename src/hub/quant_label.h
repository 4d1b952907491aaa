// What a GGUF file's name says of how its weights are quantized: Q4_K_M, MXFP4, UD-Q4_K_XL, BF16, ...
#pragma once

#include <string>
#include <string_view>

namespace millrace::hub {

// In capitals; the last label of the file's name, else of its folder's; empty: none.
std::string quant_label(std::string_view path);
// Two ways to write the same label become the same: capitals, '_' for '-', F16 for FP16.
std::string label_key(std::string_view text);
// Which of several labels is taken when nobody said: the lower, the better. Labels whose types Millrace
// does not load, or widens on a GPU, have kUnloadable or more.
constexpr int kUnloadable = 1000;
int label_rank(std::string_view label);

// "model-00002-of-00003.gguf" is part 2 of 3 of "model".
struct PartName {
  std::string prefix;
  int part = 1, parts = 1;
};
PartName part_name(std::string_view path);

}  // namespace millrace::hub
