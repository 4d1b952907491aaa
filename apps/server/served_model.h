// ServedModel: a model that is loaded, with everything that is made for it alone. A request holds one by a
// lease for as long as its answer lives; the ModelSet (model_set.h) gives leases and unloads what has none.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "chat/format.h"
#include "constraints.h"
#include "millrace/engine.h"

namespace millrace::server {

class ServedModel {
 public:
  ServedModel(std::string id, std::unique_ptr<Engine> engine, bool open_objects);
  // The same model with one of its adapters, under a name of its own. `base` is its owner.
  ServedModel(std::string id, ServedModel& base, std::string adapter);

  // Null: it has no such adapter. For no name this one itself. Lives as long as this does.
  ServedModel* with_adapter(const std::string& name);
  const std::string& adapter() const { return adapter_; }  // that requests to it ask for; empty: none

  const std::string& id() const { return id_; }  // its name in the API
  Engine& engine() { return *engine_; }
  const Engine& engine() const { return *engine_; }
  const ModelInfo& info() const { return engine_->model(); }
  const chat::Format& format() const { return *format_; }
  Constraints& constraints() { return *constraints_; }
  int64_t loaded_at() const { return loaded_at_; }  // Unix time

 private:
  // In the order of their making: each sees the ones before it.
  const std::string id_;
  const std::string adapter_;
  const std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Constraints> constraints_;
  const std::shared_ptr<chat::Format> format_;
  const int64_t loaded_at_;
  std::vector<std::unique_ptr<ServedModel>> adapted_;  // one for each adapter of the engine
};

using ModelLease = std::shared_ptr<ServedModel>;

}  // namespace millrace::server
