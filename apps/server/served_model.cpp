#include "served_model.h"

#include "timeline.h"

namespace millrace::server {

ServedModel::ServedModel(std::string id, std::unique_ptr<Engine> engine, bool open_objects)
    : id_(std::move(id)),
      engine_(std::move(engine)),
      constraints_(std::make_unique<Constraints>(
          *engine_, open_objects ? grammar::Objects::kOpen : grammar::Objects::kClosed)),
      format_(chat::make_format(*engine_, constraints_->grammars())),
      loaded_at_(static_cast<int64_t>(unix_time())) {
  for (const std::string& name : info().adapters) {
    adapted_.push_back(std::make_unique<ServedModel>(id_ + ":" + name, *this, name));
  }
}

ServedModel::ServedModel(std::string id, ServedModel& base, std::string adapter)
    : id_(std::move(id)),
      adapter_(std::move(adapter)),
      engine_(base.engine_),
      constraints_(base.constraints_),
      format_(base.format_),
      loaded_at_(base.loaded_at_) {}

ServedModel* ServedModel::with_adapter(const std::string& name) {
  if (name.empty()) return this;
  for (const std::unique_ptr<ServedModel>& one : adapted_) {
    if (one->adapter_ == name) return one.get();
  }
  return nullptr;
}

}  // namespace millrace::server
