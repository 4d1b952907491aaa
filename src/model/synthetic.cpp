#include "model/synthetic.h"

namespace millrace {

SyntheticTokenizer chatml_tokenizer(std::string_view pre, int32_t vocab) {
  // Not the models' own template, which is long: the same turns, plainly.
  constexpr const char* kTemplate =
      "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
      "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
  return {.pre = std::string(pre),
          .specials = {{vocab - 3, "<|endoftext|>"}, {vocab - 2, "<|im_start|>"}, {vocab - 1, "<|im_end|>"}},
          .bos = vocab - 3,
          .eos = vocab - 1,
          .pad = vocab - 3,
          .chat_template = kTemplate};
}

}  // namespace millrace
