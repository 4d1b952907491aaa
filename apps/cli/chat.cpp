// millrace chat: a conversation at the terminal. The history is rendered anew each turn; the engine's prefix
// cache finds what it has computed before, and only the new tokens are fed.
#include "chat.h"

#include <fmt/core.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>

#include "answer.h"
#include "base/error.h"
#include "base/mapped_file.h"
#include "channel_filter.h"
#include "interrupt.h"
#include "line_editor.h"
#include "model_options.h"
#include "open_model.h"
#include "output.h"
#include "prompt.h"
#include "sample/sampler.h"
#include "sampling_options.h"

namespace millrace::cli {
namespace {

struct ChatOptions {
  EngineOptions engine = default_options();
  SamplingOptions sampling;
  std::string system;
  int32_t max_tokens = 0;
};

constexpr const char* kChatFooter =
    "Examples:\n"
    "  millrace chat model.gguf\n"
    "  millrace chat model.gguf --system \"You answer in rhyme.\" --temp 0.9\n"
    "  millrace chat large.gguf --speculate draft --draft-model small.gguf   # the same answers, faster\n"
    "  printf 'What is 2+2?\\nAnd times 3?\\n' | millrace chat model.gguf\n"
    "In the chat, Ctrl-C stops the answer, Ctrl-D ends the program, the arrows go through earlier lines "
    "(kept in\n"
    "$XDG_STATE_HOME/millrace/history), and /help lists the commands.";

constexpr const char* kHelp =
    "  /reset          forget the conversation (the system message stays)\n"
    "  /system TEXT    set the system message and forget the conversation; no TEXT: none\n"
    "  /save FILE      write the conversation as JSON\n"
    "  /help           this list\n"
    "  /quit           end; so does Ctrl-D\n"
    "A line that ends in \\ goes on in the next; \"\"\" begins and ends a text of several lines.\n";

std::string history_path() {
  if (const char* state = std::getenv("XDG_STATE_HOME"); state != nullptr && state[0] == '/') {
    return std::string(state) + "/millrace/history";
  }
  const char* home = std::getenv("HOME");
  return home == nullptr || home[0] == '\0' ? "" : std::string(home) + "/.local/state/millrace/history";
}

// What a person says in one go: a line, lines joined by trailing backslashes, or a text between """.
std::optional<std::string> read_message(LineEditor& editor, const std::string& prompt) {
  constexpr std::string_view kFence = "\"\"\"";
  const std::string more = prompt.empty() ? "" : ". ";
  std::optional<std::string> line = editor.read(prompt);
  if (!line || interrupt_flag()) return line;
  std::string text = *line;
  if (text.starts_with(kFence)) {
    text.erase(0, kFence.size());
    while (!text.ends_with(kFence)) {
      if (!(line = editor.read(more)) || interrupt_flag()) return line;
      text += (text.empty() ? "" : "\n") + *line;
    }
    text.resize(text.size() - kFence.size());
    if (text.ends_with('\n')) text.pop_back();
  } else {
    while (text.ends_with('\\')) {
      text.back() = '\n';
      if (!(line = editor.read(more)) || interrupt_flag()) return line;
      text += *line;
    }
  }
  editor.remember(text.find('\n') == std::string::npos ? text : std::string());
  return text;
}

class Chat {
 public:
  Chat(Engine& engine, const ChatOptions& options)
      : engine_(engine), options_(options.engine), system_(options.system) {
    request_.sampling = sampling_params(options.sampling, engine.model().sampling);
    request_.adapter = only_adapter(options.engine);
    request_.max_tokens = options.max_tokens;
    validate(request_.sampling, engine.model().vocab);
    reset();
  }

  void reset() {
    messages_ = Messages::array();
    if (!system_.empty()) add_message(messages_, "system", system_);
  }

  // False: the person wants to leave.
  bool command(const std::string& line) {
    const size_t space = line.find(' ');
    const std::string name = line.substr(0, space);
    const std::string argument =
        space == std::string::npos ? "" : line.substr(line.find_last_not_of(' ', space) + 2);
    if (name == "/quit" || name == "/exit") return false;
    if (name == "/reset") {
      reset();
      write_stderr("[the conversation is forgotten]\n");
    } else if (name == "/system") {
      system_ = argument;
      reset();
      write_stderr(argument.empty() ? "[no system message]\n"
                                    : "[new system message, the conversation is forgotten]\n");
    } else if (name == "/save") {
      save(argument);
    } else if (name == "/help") {
      write_stderr(kHelp);
    } else {
      write_stderr(fmt::format("[no command {}; /help lists them]\n", valid_utf8(name)));
    }
    return true;
  }

  void say(const std::string& text) {
    add_message(messages_, "user", text);
    request_.tokens = encode_chat(engine_, messages_);
    const int32_t context = engine_.model().context;
    if (request_.tokens.size() >= static_cast<size_t>(context)) {
      messages_.erase(messages_.size() - 1);
      write_stderr(fmt::format(
          "[the conversation has {} tokens, the context {}: /reset, or start with a larger --ctx]\n",
          request_.tokens.size(), context));
      return;
    }
    ChannelFilter filter(engine_);
    std::string answer;
    const AnswerResult result = stream_answer(engine_, request_, [&](int32_t token, std::string_view piece) {
      const std::string shown = filter.push(token, piece);
      answer += shown;
      write_stdout(shown);
    });
    add_message(messages_, "assistant", answer);
    if (!answer.ends_with('\n')) write_stdout("\n");
    if (::isatty(STDIN_FILENO) == 1) print_statistics(result);
    clear_interrupt();
  }

 private:
  void print_statistics(const AnswerResult& result) const {
    write_stderr(fmt::format("[{} + {} cached tokens in, {} out at {:.1f} tok/s, {}{}; {} of {} context]\n",
                             result.computed_tokens(), result.usage.cached_tokens, result.tokens.size(),
                             result.decode_tok_s(), drafts_text(options_, result.usage),
                             to_string(result.finish), request_.tokens.size() + result.tokens.size(),
                             engine_.model().context));
  }

  void save(const std::string& path) const {
    if (path.empty()) {
      write_stderr("[/save needs a file name]\n");
      return;
    }
    // A bad file name ends no conversation: it is the one error that is answered here.
    try {
      AtomicFile file(path);
      const std::string text = Messages({{"messages", messages_}}).dump(2) + "\n";
      file.write(text.data(), text.size());
      file.commit();
      write_stderr(fmt::format("[{} messages in {}]\n", messages_.size(), path));
    } catch (const Error& error) {
      write_stderr(fmt::format("[{}]\n", error.what()));
    }
  }

  Engine& engine_;
  const EngineOptions& options_;
  Request request_;  // with the tokens of the last turn
  std::string system_;
  Messages messages_;
};

int chat(const ChatOptions& options) {
  only_adapter(options.engine);  // before anything is loaded
  const std::unique_ptr<Engine> engine = open_engine(options.engine);
  const ModelInfo& model = engine->model();
  check_writes(model);
  if (!model.chat_template_error.empty()) throw Error(ErrorCode::kUnsupported, model.chat_template_error);
  if (!model.has_chat_template) {
    throw_error(ErrorCode::kBadInput, "{}: no chat template, expected one to chat; try millrace run --raw",
                options.engine.model);
  }
  Chat conversation(*engine, options);
  const bool terminal = ::isatty(STDIN_FILENO) == 1;
  LineEditor editor(history_path());
  if (terminal) {
    write_stderr(
        fmt::format("{} on {}. /help lists commands, Ctrl-D ends.\n", valid_utf8(model.name), model.device));
  }
  while (true) {
    const std::optional<std::string> message = read_message(editor, terminal ? "> " : "");
    if (!message) break;
    if (interrupt_flag()) {  // Ctrl-C at the prompt drops the line
      if (!terminal) throw_if_interrupted();
      clear_interrupt();
      write_stderr("\n");
      continue;
    }
    if (message->find_first_not_of(" \t\r\n") == std::string::npos) continue;
    if (message->starts_with('/')) {
      if (!conversation.command(*message)) break;
      continue;
    }
    conversation.say(*message);
  }
  if (terminal) write_stderr("\n");
  return 0;
}

}  // namespace

void add_chat(CommandLine& line) {
  Command command = line.add("chat", "talk with the model");
  auto options = std::make_shared<ChatOptions>();
  options->engine.max_running = 1;
  add_model_path(command, options->engine);
  command.option("--system", options->system, "system message");
  command.option("-n,--max-tokens", options->max_tokens, "most tokens of an answer; 0: until the model ends")
      .range(0, 1 << 28)
      .show_default();
  add_sampling_options(command, options->sampling);
  add_loading_options(command, options->engine);
  add_draft_options(command, options->engine, "Guessing ahead");
  command.footer(kChatFooter);
  command.runs([options] { return chat(*options); });
}

}  // namespace millrace::cli
