// Questions to the user, and the option that answers them beforehand.
#pragma once

#include <string>

#include "command.h"

namespace millrace::cli {

// -y,--yes: every question of this process is answered with yes.
void add_yes_option(Command& command, const std::string& help);

// Asks on the terminal; anything but y or yes is no. Where there is no terminal nothing is asked: throws
// Error{kBadInput} with `refusal`.
bool confirmed(const std::string& question, const std::string& refusal);

}  // namespace millrace::cli
