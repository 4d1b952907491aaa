// Reads a call in the spelling that a template has (call_shape.h), as it comes. Arguments come out as JSON:
// behind the name as they are, of tags each when its value is whole, of Python's when all are. Between tags
// JSON may stand too: arguments that are held to a schema are written so.
#pragma once

#include <map>
#include <string>

#include "chat/call_shape.h"
#include "chat/json_scanner.h"

namespace millrace::chat {

// By a tool's name and a key of its arguments: is the value a string?
using StringKeys = std::map<std::string, std::map<std::string, bool>>;

class ShapeScanner : public CallReader {
 public:
  // `rest`: what must come before the name. Both outlive the scanner.
  ShapeScanner(const CallShape& shape, const StringKeys& strings, std::string rest);

  JsonScanner::State push(char c) override;
  bool has_name() const override { return has_name_; }
  const std::string& name() const override { return name_; }
  std::string take_arguments() override;
  std::string unread() const override { return held_; }

 private:
  enum class Stage { kRest, kName, kNameEnd, kBody, kKey, kKeyEnd, kValue, kJson, kPython, kEnd };

  bool step(char c);
  bool name_end();
  bool body();
  bool value();
  bool python(char c);
  void enter(Stage stage);
  bool end_arguments(std::string_view arguments);

  const CallShape& shape_;
  const StringKeys& strings_;
  std::string rest_, end_, value_end_;  // end_: the first mark of the shape's; models leave the others out
  Stage stage_ = Stage::kRest;
  bool has_name_ = false, is_done_ = false;
  std::string held_;  // of this stage
  std::string name_, key_, any_, arguments_;
  JsonScanner json_;
  bool has_members_ = false;
  char quote_ = 0;  // of Python's: in a string
  bool escaped_ = false;
  int depth_ = 0;
};

}  // namespace millrace::chat
