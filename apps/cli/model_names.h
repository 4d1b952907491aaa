// What a user may write for MODEL: a path, a name of the hub (hf:owner/name:Q4_K_M) or a short name
// (gpt-oss-20b). What is not on this machine is described and, if the user wants it, fetched.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "hub/model_name.h"
#include "hub/puller.h"
#include "hub/remote_head.h"
#include "hub/settings.h"
#include "millrace/options.h"

namespace millrace::cli {

// The path to open. Paths come back as they are, even of files that are not there: who opens them says so.
// Throws Error{kBadInput} for a name that means nothing, and when the user does not want the model fetched.
std::string find_model(const std::string& given, const EngineOptions& options);

// The same for who looks at tensors' shapes alone: of a model that is not here, the head is fetched and the
// rest is not. `path` can be opened as long as this lives.
struct FoundHead {
  std::string path;
  std::unique_ptr<hub::RemoteHead> remote;
};
FoundHead find_head(const std::string& given);

// The hub's name of what was given: hf:... itself, or what a short name stands for. Empty: a path. Throws
// Error{kBadInput} for what is neither, with names that resemble it.
std::optional<hub::ModelName> hub_name(const std::string& given);

// The path of that model among the files of this machine; empty: it is not here.
std::string find_on_this_machine(const std::string& given, const hub::ModelName& name,
                                 const hub::Settings& settings);

// What a server calls the model when nobody said: the file's name, or the repository's with its quantization.
std::string model_title(const std::string& given);

// Fetches under a progress bar and returns the path to open. Throws Interrupted after Ctrl-C.
std::string fetch_model(const hub::PullPlan& plan, const hub::Settings& settings, bool json = false);

}  // namespace millrace::cli
