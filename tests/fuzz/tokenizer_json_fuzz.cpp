// Any bytes as a tokenizer.json: an Error, or a tokenizer that encodes and decodes.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/error.h"
#include "tokenizer/detokenizer.h"
#include "touch.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace millrace;
  const std::string_view json(reinterpret_cast<const char*>(data), size);
  try {
    const auto tokenizer = Tokenizer::from_json(json, "", "input");
    // Words, spaces, digits, marks that compose, bytes that are no UTF-8, and the file itself for its own
    // tokens.
    const std::string text =
        "hello  world's 123\r\n e\xcc\x81 \xe4\xb8\xad \xff<s>" + std::string(json.substr(0, 200));
    for (const bool parse_special : {true, false}) {
      Tokenizer::EncodeOptions options;
      options.parse_special = parse_special;
      const std::vector<TokenId> ids = tokenizer->encode(text, options);
      fuzz::touch(tokenizer->decode(ids, true));
      StreamingDetokenizer stream(tokenizer);
      for (const TokenId id : ids) {
        if (id < 0 || id >= tokenizer->vocab_size()) __builtin_trap();
        fuzz::touch(stream.push(id));
      }
      fuzz::touch(stream.finish());
    }
  } catch (const Error& error) {
    fuzz::check_message(error.what());
  }
  return 0;
}
