// Setting: an option as files and the environment know it, by the name of its key and the type of its value.
#pragma once

#include <string>

namespace millrace::cli {

struct Setting {
  enum class Kind { kText, kInteger, kReal, kFlag, kAmount };  // kAmount: 0.9, or "16G"
  std::string key;  // the long name without dashes before it: "max-running"; "model" for MODEL
  Kind kind = Kind::kText;
  bool list = false;  // may be given several times
};

}  // namespace millrace::cli
