// LoadedModel: what an LLM object holds: the engine with the chat format and the grammars of its model
// (ServedModel), and the server's own way from a request to its reply, without a socket. Streams and answers
// hold it too: it is gone when the last of them is.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "millrace/engine.h"
#include "server/api.h"
#include "server/model_set.h"
#include "server/options.h"
#include "server/served_model.h"

namespace millrace::python {

class LoadedModel {
 public:
  // `engine`: made with these options. `name`: what answers call the model.
  LoadedModel(const std::string& name, std::unique_ptr<Engine> engine, const EngineOptions& options,
              bool open_objects);
  ~LoadedModel() { close(); }
  LoadedModel(const LoadedModel&) = delete;
  LoadedModel& operator=(const LoadedModel&) = delete;

  Engine& engine() { return model_->engine(); }
  server::ServedModel& model() { return *model_; }
  const ModelInfo& info() const { return model_->info(); }
  server::Api& api() { return api_; }
  server::ModelSet& models() { return models_; }
  const std::string& name() const { return name_; }

  // What still runs is cancelled; later requests are refused. Any number of times, from any thread.
  void close() { engine().shutdown(false); }

 private:
  const std::string name_;
  server::ModelSet models_;
  server::Api api_;
  server::ModelLease model_;  // after the set that gave it
};

}  // namespace millrace::python
