// The commands. Each add_*() declares one with its options, its help and what it does.
#pragma once

#include "command.h"

namespace millrace::cli {

void add_run(CommandLine& line);
void add_chat(CommandLine& line);
void add_inspect(CommandLine& line);
void add_tokenize(CommandLine& line);
void add_logits(CommandLine& line);
void add_perplexity(CommandLine& line);
void add_bench(CommandLine& line);
void add_synth(CommandLine& line);
void add_quantize(CommandLine& line);
void add_serve(CommandLine& line);
void add_tune(CommandLine& line);

}  // namespace millrace::cli
