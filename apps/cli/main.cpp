// millrace: parses the command line, runs one command, and turns what it throws into one line and a status:
//   0 done   1 a fault of the program   2 bad input, files, options, no memory or disk   128 + n signal n
// This is the only place of the command line that catches Error.
#include <fmt/format.h>
#include <unistd.h>

#include <new>
#include <string>

#include "base/error.h"
#include "commands.h"
#include "interrupt.h"
#include "output.h"

#ifndef MILLRACE_VERSION
#error "the build defines MILLRACE_VERSION"
#endif

namespace millrace::cli {
namespace {

constexpr int kStatusInternal = 1;
constexpr int kStatusBadInput = 2;

constexpr const char* kFooter =
    "Start with:\n"
    "  millrace run model.gguf -p \"Why is the sky blue?\"\n"
    "  millrace chat model.gguf\n"
    "  millrace serve model.gguf                  # OpenAI's API and a page on http://127.0.0.1:8080\n"
    "  millrace inspect model.gguf                # what is in it, what memory it needs\n"
    "  millrace synth tiny-gpt-oss tiny.gguf      # a random-weight model to try things on\n"
    "MODEL is a GGUF file (the first part of a split one) or a Hugging Face directory with safetensors.\n"
    "Every command explains itself: millrace run --help\n"
    "Exit status: 0 done, 1 a fault of the program, 2 bad input or options, 130 interrupted.";

int fail(int status, std::string message) {
  for (char& c : message) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  write_stderr(fmt::format("millrace: {}\n", message));
  return status;
}

int run_command_line(int argc, char** argv) {
  CLI::App app("Millrace: runs large language models on your machine.", "millrace");
  app.set_version_flag("--version", "millrace " MILLRACE_VERSION);
  app.require_subcommand(1);
  app.footer(kFooter);
  Action action;
  add_run(app, action);
  add_chat(app, action);
  add_serve(app, action);
  add_inspect(app, action);
  add_tokenize(app, action);
  add_logits(app, action);
  add_perplexity(app, action);
  add_bench(app, action);
  add_synth(app, action);
  add_quantize(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    // The help asked for is that of the innermost command named.
    const auto chosen = app.get_subcommands();
    write_stdout((chosen.empty() ? &app : chosen.back())->help());
    return 0;
  } catch (const CLI::CallForVersion&) {
    write_stdout("millrace " MILLRACE_VERSION "\n");
    return 0;
  } catch (const CLI::ParseError& error) {
    const auto chosen = app.get_subcommands();
    const std::string name = chosen.empty() ? "millrace" : "millrace " + chosen.back()->get_name();
    return fail(kStatusBadInput, fmt::format("{} (see {} --help)", error.what(), name));
  }
  return action();
}

int guarded_main(int argc, char** argv) {
  try {
    return run_command_line(argc, argv);
  } catch (const Error& error) {
    return fail(kStatusBadInput, error.what());
  } catch (const Interrupted& interrupted) {
    return 128 + interrupted.signal;
  } catch (const ClosedOutput&) {
    return 128 + SIGPIPE;  // the reader of our output has gone: nothing to say to nobody
  } catch (const std::bad_alloc&) {
    return fail(kStatusBadInput, "out of memory: a smaller --ctx or a smaller model may fit");
  } catch (const std::exception& error) {
    return fail(kStatusInternal, fmt::format("internal error: {}", error.what()));
  }
}

}  // namespace
}  // namespace millrace::cli

int main(int argc, char** argv) {
  millrace::cli::install_signal_handlers();
  return millrace::cli::guarded_main(argc, argv);
}
