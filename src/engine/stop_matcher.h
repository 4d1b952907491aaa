// StopMatcher: cuts text that comes in pieces at the first stop string. Text that could still turn out to be
// the start of a stop string is held back until it is decided, so no part of one is ever shown.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace millrace {

class StopMatcher {
 public:
  // Empty strings among `stops` are ignored.
  explicit StopMatcher(std::vector<std::string> stops);

  // The text now known to be outside any stop string; empty once stopped.
  std::string push(std::string_view text);
  // The end of the text: what was held back.
  std::string finish();
  bool stopped() const { return stopped_; }
  const std::string& found() const { return found_; }  // the string it stopped at; empty: none

 private:
  std::vector<std::string> stops_;
  std::string held_, found_;
  bool stopped_ = false;
};

}  // namespace millrace
