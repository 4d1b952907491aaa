// The header of a harmony message: what stands between <|start|> or <|channel|> and <|message|>. Gathered
// character by character, so that it does not matter how the text was cut into tokens.
//
// A header is a row of words: a role (behind <|start|>), a channel (behind <|channel|>), to=RECIPIENT in
// either place, a content type (behind <|constrain|>, or json, code or text). Everything else was never a
// header: the model forgot <|message|>, or the form altogether, and the text is handed back.
#pragma once

#include <string>

namespace millrace::chat {

class HarmonyHeader {
 public:
  enum class Place {
    kPrompt,   // behind the prompt's "<|start|>assistant"
    kBetween,  // behind a message's end, where <|start|> should come
    kStart,    // behind <|start|>
  };
  explicit HarmonyHeader(Place place) : place_(place) {}

  // All return false when no header goes on like this: text() has what was taken for one, and the rest says
  // what is sure without it.
  bool add(char c);
  bool begin_channel();  // <|channel|>
  bool begin_type();     // <|constrain|>
  bool end();            // <|message|>
  // The message ends before it began: every doubt is resolved for text. `cut`: the answer ends here, perhaps
  // in the middle of a word.
  void abandon(bool cut);

  // What is text if this is no header after all: all but the words that can be nothing else.
  const std::string& text() const { return text_; }
  bool other_role() const;  // a message of somebody else: user, a tool
  const std::string& channel() const { return now_.channel; }
  const std::string& recipient() const { return now_.recipient; }

 private:
  bool fits(const std::string& word, bool whole) const;
  bool end_word();
  bool take_word();  // true when it can be nothing but a header's
  bool fail();

  Place place_;
  bool channel_next_ = false, type_next_ = false;
  bool role_possible_ = true;  // nothing but a role has come
  struct Said {
    std::string role, channel, recipient;
  };
  Said now_, sure_;  // sure_: without the words that may yet turn out to be text
  std::string word_, text_;
};

}  // namespace millrace::chat
