// The command line's names for EngineOptions (millrace/options.h): every command that runs a model binds its
// options to that struct and nothing else.
#pragma once

#include <functional>
#include <string>

#include "command.h"
#include "millrace/options.h"

namespace millrace::cli {

// What a command begins with; its options change it.
inline EngineOptions default_options() { return {.device = "auto"}; }

inline constexpr const char* kModelHelp =
    "GGUF file, Hugging Face directory, hf:owner/name:Q4_K_M or a short name";
// MODEL, and --yes for one that has to be fetched
void add_model_path(Command& command, EngineOptions& options);
// --device --gpu-memory --threads --ctx --kv-type
void add_planning_options(Command& command, EngineOptions& options);
// The same, and --lock
void add_device_options(Command& command, EngineOptions& options);
void add_replica_option(Command& command, EngineOptions& options);
// Of ranks that the command starts itself, and starts again.
// `of_use`: there are ranks.
void add_launch_options(Command& command, EngineOptions& options, const std::function<bool()>& of_use);
// For commands that run one model, which ranks may share: --tensor-parallel --pipeline-parallel
// --expert-parallel --rank-speeds
void add_rank_options(Command& command, EngineOptions& options);
// --quantize --budget --sample; the last is a file's name until checked() has read it
void add_quantize_option(Command& command, EngineOptions& options);
void add_image_option(Command& command, EngineOptions& options);
// --adapter, once; or, with `many`, any number of times
void add_adapter_option(Command& command, EngineOptions& options, bool many = false);
// Of a command that runs one model with one adapter at the most: device, ranks, quantizing, adapter.
void add_loading_options(Command& command, EngineOptions& options);
// The name of that one, or none: what a command's own requests ask for.
std::string only_adapter(const EngineOptions& options);
// For engines with many clients: --max-running, --kv-tokens and the like, under a heading of the help. The
// same heading has the options of drafts.
void add_engine_options(Command& command, EngineOptions& options, const std::string& group);
// --speculate --draft-model --max-draft
void add_draft_options(Command& command, EngineOptions& options, const std::string& group);

// The options as the engine takes them, with the text of --sample. Throws Error under the option's own name
// for what makes no sense.
EngineOptions checked(EngineOptions options);

}  // namespace millrace::cli
