#include "served_model.h"

#include "timeline.h"

namespace millrace::server {

ServedModel::ServedModel(std::string id, std::unique_ptr<Engine> engine, bool open_objects)
    : id_(std::move(id)),
      engine_(std::move(engine)),
      constraints_(std::make_unique<Constraints>(
          *engine_, open_objects ? grammar::Objects::kOpen : grammar::Objects::kClosed)),
      format_(chat::make_format(*engine_, constraints_->grammars())),
      loaded_at_(static_cast<int64_t>(unix_time())) {}

}  // namespace millrace::server
