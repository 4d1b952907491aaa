// How a model family spells calls of tools, learned from its chat template: one call and two are rendered,
// and what stands around names, keys and values is what the family writes there.
//
//   open  begin NAME name_end ARGUMENTS end  between  begin NAME name_end ARGUMENTS end  close
//
//   named    JSON behind the name: DeepSeek 3.1, Kimi K2, Functionary
//   tagged   key_begin KEY key_end VALUE value_end, any number of times: Qwen 3.5 and Coder, GLM, Seed-OSS,
//   Nemotron 3 python   NAME(key=value, ..): LFM 2.5 object   {"name": .., "arguments": ..} between marks of
//   its own: Nemotron Nano 2, Apriel
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "chat/chat_codec.h"

namespace millrace::chat {

struct CallShape {
  enum class Kind { kNone, kObject, kNamed, kTagged, kPython };
  // In begin, name_end and key_end: a few letters or digits that differ from call to call (an id, a number, a
  // type).
  static constexpr char kAny = '\x01';

  Kind kind = Kind::kNone;
  std::string open = {}, close = {};  // as the template writes them, white space and all
  std::string begin = {}, end = {}, between = {};
  std::string name_end = {};
  std::string key_begin = {}, key_end = {}, value_end = {};
  std::string any_of_string = {};  // tagged: what stands for kAny in key_end where the value is a string
  std::string arguments_key = {};  // object: arguments or parameters

  // What tells text from a call: the first mark of `open`, of `begin`, and the second of `begin`, which some
  // models begin with; `rest`: what must follow up to the name.
  struct Opener {
    std::string mark, rest;
  };
  std::vector<Opener> openers() const;
  std::vector<std::string> marks() const;  // every <..> in any part
};

// Kind kNone where the template writes no calls, or in no way that is known here. `written`: what it wrote
// for the calls below, to see that they can be read back.
CallShape learn_call_shape(const Codec& codec, std::string& written);
struct ProbeCall {
  std::string name, arguments;
};
std::vector<ProbeCall> probe_calls();

// Does `text` begin like `mark`, whatever white space either has?
enum class Match { kNo, kPartly, kWhole };
Match match_mark(std::string_view text, std::string_view mark, std::string* any = nullptr);

}  // namespace millrace::chat
