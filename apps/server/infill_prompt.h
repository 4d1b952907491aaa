// The prompt of a gap: what stands before it and behind it, between the tokens that the model was trained
// with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "millrace/engine.h"

namespace millrace::server {

struct Gap {
  std::string prefix = {}, suffix = {};
  struct File {
    std::string name = {}, text = {};
  };
  std::vector<File> files = {};  // others of the same project, the most telling last
};

// The vocabulary must have the tokens (ModelInfo::Infill::fills). Names of tokens in the texts are letters.
// Stops once more tokens than the context has have come out.
std::vector<int32_t> infill_prompt(const Engine& engine, const Gap& gap);

}  // namespace millrace::server
