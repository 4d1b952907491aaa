// The commands. Each add_*() declares a subcommand with its options and help; when the user names it, parsing
// sets `action`, and main runs that. An action returns the exit status and throws Error for what goes wrong.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace millrace::cli {

using Action = std::function<int()>;

void add_run(CLI::App& app, Action& action);
void add_chat(CLI::App& app, Action& action);
void add_inspect(CLI::App& app, Action& action);
void add_tokenize(CLI::App& app, Action& action);
void add_logits(CLI::App& app, Action& action);
void add_perplexity(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_synth(CLI::App& app, Action& action);
void add_serve(CLI::App& app, Action& action);
void add_quantize(CLI::App& app, Action& action);

}  // namespace millrace::cli
