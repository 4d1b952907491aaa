// millrace: parses the command line, runs one command, and turns what it throws into one line and a status:
//   0 done   1 a fault of the program   2 bad input, files, options, no memory or disk   128 + n signal n
// This is the only place of the command line that catches Error.
#include <fmt/core.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <new>
#include <string>
#include <thread>

#include "base/error.h"
#include "bench.h"
#include "calibrate.h"
#include "chat.h"
#include "devices.h"
#include "dist/mpi_communicator.h"
#include "inspect.h"
#include "interrupt.h"
#include "list.h"
#include "logits.h"
#include "open_model.h"
#include "output.h"
#include "perplexity.h"
#include "pull.h"
#include "quantize.h"
#include "rank.h"
#include "rm.h"
#include "run.h"
#include "serve.h"
#include "synth.h"
#include "tokenize.h"
#include "tune.h"

#ifndef MILLRACE_VERSION
#error "the build defines MILLRACE_VERSION"
#endif

namespace millrace::cli {
namespace {

constexpr int kStatusInternal = 1;
constexpr int kStatusBadInput = 2;

constexpr const char* kMainFooter =
    "Start with:\n"
    "  millrace run model.gguf -p \"Why is the sky blue?\"\n"
    "  millrace chat model.gguf\n"
    "  millrace serve model.gguf                  # OpenAI's API and a page on http://127.0.0.1:8080\n"
    "  millrace inspect model.gguf                # what is in it, what memory it needs\n"
    "  millrace synth tiny-gpt-oss tiny.gguf      # a random-weight model to try things on\n"
    "  millrace pull gpt-oss-20b                  # fetch a model; millrace list --known has the names\n"
    "MODEL is a GGUF file (the first part of a split one), a Hugging Face directory with safetensors, or the "
    "name of\n"
    "a model: gpt-oss-20b, hf:Qwen/Qwen3-4B-GGUF:Q4_K_M. What is not here is described and fetched if you "
    "want.\n"
    "Every command explains itself: millrace run --help\n"
    "Options may also stand in the environment, MILLRACE_PORT for --port, and in a TOML file, port = 8080: "
    "that "
    "of\n"
    "--config, or $XDG_CONFIG_HOME/millrace/config.toml and /etc/millrace/config.toml. The line counts "
    "first, "
    "then\n"
    "the environment, then the file; --print-config shows what holds (docs/configuration.md).\n"
    "Exit status: 0 done, 1 a fault of the program, 2 bad input or options, 130 interrupted.";

// Ranks of a job often fail alike: rank 0 says why and ends the job, and the others wait for that, so that it
// is said once. One that fails alone speaks then. Those of millrace serve do not wait, and are not waited
// for: what all of them would fail of has failed the process that started them.
void let_rank_zero_speak(int status) {
  if (dist::launched_rank() == 0 || std::getenv("MILLRACE_RANK_KEY") != nullptr) return;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(3);
  while (std::chrono::steady_clock::now() < until) {
    if (interrupt_flag()) std::_Exit(status);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

int fail(int status, std::string message) {
  let_rank_zero_speak(status);
  for (char& c : message) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  write_stderr(fmt::format("millrace: {}\n", message));
  return status;
}

int run_command_line(int argc, char** argv) {
  CommandLine line("Millrace: runs large language models on your machine.", "millrace " MILLRACE_VERSION,
                   kMainFooter);
  add_run(line);
  add_chat(line);
  add_serve(line);
  add_pull(line);
  add_list(line);
  add_rm(line);
  add_inspect(line);
  add_tokenize(line);
  add_logits(line);
  add_perplexity(line);
  add_bench(line);
  add_calibrate(line);
  add_synth(line);
  add_quantize(line);
  add_tune(line);
  add_devices(line);
  add_rank(line);
  return line.parse(argc, argv)();
}

int guarded_main(int argc, char** argv) {
  try {
    return run_command_line(argc, argv);
  } catch (const Error& error) {
    return fail(kStatusBadInput, error.what());
  } catch (const UsageError& error) {
    return fail(kStatusBadInput, error.what());
  } catch (const Followed&) {
    return 0;
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
  const int status = millrace::cli::guarded_main(argc, argv);
  if (status != 0) millrace::dist::abort_mpi(status);  // the other ranks would wait for this one
  return status;
}
