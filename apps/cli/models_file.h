// Which models a server has: those of a folder, or those that a TOML file names with options of their own.
#pragma once

#include <string>
#include <vector>

#include "millrace/options.h"
#include "server/model_set.h"

namespace millrace::cli {

struct ModelList {
  std::vector<server::ModelSpec> models = {};
  std::vector<std::string> preload = {};  // names: loaded before the server listens
};

// `path` is a folder (every .gguf file, and every folder with config.json and *.safetensors, is a model
// called as its file without the ending) or a TOML file:
//
//   [[model]]
//   path = "qwen3-8b.gguf"       # relative to this file
//   name = "qwen3"               # default: the file's
//   aliases = ["gpt-4o-mini"]
//   preload = true               # loaded at the start
//   keep = true                  # never unloaded
//   unload-after = 600           # seconds idle
//   ctx = 8192                   # and every other option of the engine, as on the command line
//
// `defaults` holds for what a model does not say. Throws Error naming the file and the model.
ModelList read_models(const std::string& path, const EngineOptions& defaults);

}  // namespace millrace::cli
