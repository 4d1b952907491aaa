// The LineEditor on libedit (histedit.h).
#include <histedit.h>
#include <unistd.h>

#include <clocale>
#include <cstdio>
#include <cwchar>
#include <filesystem>

#include "interrupt.h"
#include "line_editor.h"

namespace millrace::cli {
namespace {

constexpr int kHistoryLines = 1000;

char* prompt_of(EditLine* editor) {
  void* text = nullptr;
  el_get(editor, EL_CLIENTDATA, &text);
  return static_cast<std::string*>(text)->data();
}

// libedit's own reader begins again after a signal; this one gives up the line when it was Ctrl-C.
int read_character(EditLine*, wchar_t* out) {
  std::mbstate_t state{};
  while (true) {
    char byte = 0;
    const int n = read_byte(&byte);
    if (n <= 0) return n;
    const size_t length = std::mbrtowc(out, &byte, 1, &state);
    if (length == static_cast<size_t>(-2)) continue;  // part of a character
    if (length == static_cast<size_t>(-1)) {          // not a character at all: left out
      state = {};
      continue;
    }
    return 1;
  }
}

}  // namespace

struct LineEditor::State {
  EditLine* editor = nullptr;
  History* history = nullptr;
  HistEvent event{};
  std::string prompt, history_path;
};

LineEditor::LineEditor(const std::string& history_path) {
  if (::isatty(STDIN_FILENO) != 1) return;
  std::setlocale(LC_CTYPE, "");  // libedit edits characters, not bytes
  if (std::string(std::setlocale(LC_CTYPE, nullptr)) == "C") std::setlocale(LC_CTYPE, "C.UTF-8");
  state_ = std::make_unique<State>();
  state_->history_path = history_path;
  state_->editor = el_init("millrace", stdin, stderr, stderr);
  state_->history = history_init();
  if (state_->editor == nullptr || state_->history == nullptr) return;
  history(state_->history, &state_->event, H_SETSIZE, kHistoryLines);
  history(state_->history, &state_->event, H_SETUNIQUE, 1);
  if (!history_path.empty()) history(state_->history, &state_->event, H_LOAD, history_path.c_str());
  el_set(state_->editor, EL_CLIENTDATA, &state_->prompt);
  el_set(state_->editor, EL_PROMPT, prompt_of);
  el_set(state_->editor, EL_GETCFN, read_character);
  el_set(state_->editor, EL_EDITOR, "emacs");
  el_set(state_->editor, EL_HIST, history, state_->history);
  el_set(state_->editor, EL_BIND, "^R", "em-inc-search-prev", nullptr);
  el_source(state_->editor, nullptr);  // the user's ~/.editrc
}

LineEditor::~LineEditor() {
  if (!state_) return;
  if (state_->history != nullptr) history_end(state_->history);
  if (state_->editor != nullptr) el_end(state_->editor);
}

std::optional<std::string> LineEditor::read(const std::string& prompt) {
  if (!state_ || state_->editor == nullptr) return read_plain_line();
  state_->prompt = prompt;
  int count = 0;
  const char* line = el_gets(state_->editor, &count);
  if (line == nullptr || count <= 0) {
    if (!interrupt_flag()) return std::nullopt;
    el_reset(state_->editor);
    return std::string();
  }
  std::string text(line, static_cast<size_t>(count));
  if (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

void LineEditor::remember(const std::string& line) {
  if (!state_ || state_->history == nullptr || line.empty()) return;
  history(state_->history, &state_->event, H_ENTER, line.c_str());
  if (state_->history_path.empty()) return;
  // A history that cannot be kept is no reason to stop talking.
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(state_->history_path).parent_path(), ignored);
  history(state_->history, &state_->event, H_SAVE, state_->history_path.c_str());
}

}  // namespace millrace::cli
