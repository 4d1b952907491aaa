#include "loaded_model.h"

namespace millrace::python {
namespace {

server::ServerOptions api_options() {
  server::ServerOptions options;
  options.timeline = false;  // nobody looks at it
  options.stored_responses = 0;
  return options;
}

// What is kept beside the loaded model: who watched it being loaded is gone by then.
EngineOptions kept(EngineOptions options) {
  options.on_load = nullptr;
  return options;
}

}  // namespace

LoadedModel::LoadedModel(const std::string& name, std::unique_ptr<Engine> engine,
                         const EngineOptions& options, bool open_objects)
    : name_(name),
      models_({{.name = name, .engine = kept(options), .keep = true}},
              {.defaults = kept(options), .open_objects = open_objects}, server::Log(false)),
      api_(models_, api_options()) {
  models_.adopt(name, std::move(engine));
  model_ = models_.lease(name);
}

}  // namespace millrace::python
