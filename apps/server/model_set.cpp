// Names, leases and what is said of models; model_set_loading.cpp has the set's own thread.
#include "model_set.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/error.h"
#include "engine/stats_sum.h"
#include "model_errors.h"

namespace millrace::server {
namespace {

// The same lease, of the model with this adapter. Empty: of the model itself.
ModelLease with_adapter(ModelLease lease, const std::string& adapter) {
  if (!lease) return lease;
  ServedModel* const adapted = lease->with_adapter(adapter);
  return {std::move(lease), adapted};
}

}  // namespace

ModelSet::ModelSet(std::vector<ModelSpec> specs, const ModelSetOptions& options, const Log& log)
    : options_(options), log_(log) {
  if (specs.empty()) throw_error(ErrorCode::kBadInput, "models: found none, expected at least one");
  for (ModelSpec& spec : specs) {
    ModelFile file = read_model_file(spec.engine.model);
    add(std::move(spec), std::move(file));
  }
  thread_ = std::thread([this] { run(); });
}

ModelSet::~ModelSet() { stop(); }

void ModelSet::add(ModelSpec spec, ModelFile file) {
  // Its own name again, or an alias twice, is nothing to complain about.
  std::vector<std::string>& aliases = spec.aliases;
  std::erase(aliases, spec.name);
  for (auto alias = aliases.begin(); alias != aliases.end();) {
    alias = std::find(aliases.begin(), alias, *alias) != alias ? aliases.erase(alias) : alias + 1;
  }
  auto slot = std::make_unique<Slot>();
  for (const std::string& adapter : spec.engine.adapters) {  // "name=path"
    slot->adapters.push_back(adapter.substr(0, adapter.find('=')));
  }
  std::vector<std::string> names = aliases;
  names.push_back(spec.name);
  const size_t own = names.size();
  for (const std::string& adapter : slot->adapters) {
    for (size_t i = 0; i < own; ++i) names.push_back(names[i] + ":" + adapter);
  }
  for (const std::string& name : names) {
    if (name.empty()) throw_error(ErrorCode::kBadInput, "models: found an empty name");
    if (known(name) == nullptr) continue;
    throw_error(ErrorCode::kBadInput, "models: found the name '{}' twice, expected each once", name);
  }
  slot->file = std::move(file);
  if (!slot->file.error.empty()) {
    slot->last_error = public_reason(slot->file.error, spec);
    log_.write("warn", "not a model", {{"model", spec.name}, {"reason", slot->file.error}});
  }
  slot->spec = std::move(spec);
  slots_.push_back(std::move(slot));
}

void ModelSet::take(const std::string& name, const std::string& path) {
  ModelSpec spec{.name = name, .engine = options_.defaults, .pulled = true};
  spec.engine.model = path;
  // A name may have slashes in it.
  if (!spec.engine.kv_dir.empty())
    spec.engine.kv_dir += fmt::format("/{:016x}", std::hash<std::string>()(name));
  ModelFile file = read_model_file(path);
  const std::lock_guard lock(mutex_);
  add(std::move(spec), std::move(file));
  log_.write("info", "model taken in", {{"model", name}});
}

void ModelSet::drop(const std::function<bool(const std::string& path)>& is_deleted) {
  const auto leaves = [&](const std::unique_ptr<Slot>& slot) {
    const EngineOptions& engine = slot->spec.engine;
    return is_deleted(engine.model) || (!engine.draft_model.empty() && is_deleted(engine.draft_model));
  };
  const std::lock_guard lock(mutex_);
  for (const std::unique_ptr<Slot>& slot : slots_) {
    if (!leaves(slot)) continue;
    const std::string& name = slot->spec.name;
    if (!slot->spec.pulled) {
      throw ApiError(403, fmt::format("the model '{}' was not pulled: its files are not this server's", name),
                     "model", "not_allowed");
    }
    if (slot->model || slot->state != State::kUnloaded || slot->leases > 0 || !slot->waiting.empty()) {
      throw ApiError(409, fmt::format("the model '{}' is loaded: unload it first (keep_alive 0)", name),
                     "model", "model_loaded");
    }
  }
  std::erase_if(slots_, [&](const std::unique_ptr<Slot>& slot) {
    if (!leaves(slot)) return false;
    add_stats(dropped_, slot->past);
    log_.write("info", "model dropped", {{"model", slot->spec.name}});
    return true;
  });
}

void ModelSet::in_background(std::function<void(const std::stop_token&)> work) {
  const std::lock_guard lock(mutex_);
  std::erase_if(background_, [](const Background& one) { return one.ended->load(); });
  auto ended = std::make_shared<std::atomic<bool>>(false);
  background_.push_back({ended, std::jthread([ended, work = std::move(work)](const std::stop_token& stop) {
                           work(stop);
                           *ended = true;
                         })});
}

void ModelSet::rescan() {
  const std::lock_guard lock(mutex_);
  rescan_wanted_ = find_all != nullptr;
  news_.notify_all();
}

void ModelSet::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  news_.notify_all();
  if (thread_.joinable()) thread_.join();
  std::list<Background> background;
  {
    const std::lock_guard lock(mutex_);
    background.swap(background_);
  }
  background.clear();  // asks each to end, and waits
}

// ---------------------------------------------------------------- for requests

ModelSet::Slot* ModelSet::known(const std::string& name) const {
  for (const std::unique_ptr<Slot>& slot : slots_) {
    const std::vector<std::string>& aliases = slot->spec.aliases;
    if (slot->spec.name == name) return slot.get();
    if (std::find(aliases.begin(), aliases.end(), name) != aliases.end()) return slot.get();
    if (!adapter_of(*slot, name).empty()) return slot.get();
  }
  return nullptr;
}

std::string ModelSet::adapter_of(const Slot& slot, const std::string& name) {
  const auto is_own = [&](std::string_view base) {
    const std::vector<std::string>& aliases = slot.spec.aliases;
    return slot.spec.name == base || std::find(aliases.begin(), aliases.end(), base) != aliases.end();
  };
  if (is_own(name)) return {};
  for (const std::string& adapter : slot.adapters) {
    const size_t tail = adapter.size() + 1;
    if (name.size() <= tail || !name.ends_with(":" + adapter)) continue;
    if (is_own(std::string_view(name).substr(0, name.size() - tail))) return adapter;
  }
  return {};
}

bool ModelSet::has(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return known(name) != nullptr;
}

ModelSet::Slot& ModelSet::find(const std::string& name) const {
  if (name.empty() && slots_.size() == 1) return *slots_.front();
  if (Slot* slot = known(name)) return *slot;
  std::string all;
  for (const std::unique_ptr<Slot>& slot : slots_) {
    all += fmt::format("{}'{}'", all.empty() ? "" : ", ", slot->spec.name);
    for (const std::string& adapter : slot->adapters) {
      all += fmt::format(", '{}:{}'", slot->spec.name, adapter);
    }
  }
  if (name.empty()) {
    throw ApiError(400, fmt::format("'model' is missing; this server has {}", all), "model",
                   "missing_required_parameter");
  }
  throw ApiError(404,
                 fmt::format("the model '{}' does not exist; this server has {}", name.substr(0, 200), all),
                 "model", "model_not_found");
}

// The slot's own model stays while there are leases: no lease is ever the last to hold it.
ModelLease ModelSet::make_lease(Slot& slot) {
  ++slot.leases;
  return {slot.model.get(), [this, &slot](ServedModel*) {
            const std::lock_guard lock(mutex_);
            --slot.leases;
            slot.last_used = Clock::now();
            if (slot.leases == 0) news_.notify_all();
          }};
}

ModelLease ModelSet::lease(const std::string& name) {
  const std::lock_guard lock(mutex_);
  Slot& slot = find(name);
  return slot.model ? with_adapter(make_lease(slot), adapter_of(slot, name)) : nullptr;
}

void ModelSet::load(const std::string& name, Done done) {
  ModelLease loaded;
  {
    const std::lock_guard lock(mutex_);
    Slot& slot = find(name);
    const std::string adapter = adapter_of(slot, name);
    if (slot.model) {
      loaded = with_adapter(make_lease(slot), adapter);
    } else if (!stopping_) {
      slot.waiting.push_back(
          [done = std::move(done), adapter](ModelLease lease, std::optional<ApiError> error) {
            done(with_adapter(std::move(lease), adapter), std::move(error));
          });
      if (slot.state == State::kUnloaded) slot.state = State::kLoading;
      if (slot.waiting.size() == 1) queue_.push_back(&slot);
      news_.notify_all();
      return;
    }
  }
  if (loaded) {
    done(std::move(loaded), std::nullopt);
  } else {
    done(nullptr, stopping_error());
  }
}

void ModelSet::unload(const std::string& name) {
  const std::lock_guard lock(mutex_);
  Slot& slot = find(name);
  if (slot.spec.keep) {
    throw ApiError(400, fmt::format("the model '{}' is kept: it cannot be unloaded", slot.spec.name), "model",
                   "model_kept");
  }
  slot.unload_wanted = slot.model != nullptr;
  news_.notify_all();
}

void ModelSet::stay(const std::string& name, double seconds) {
  const std::lock_guard lock(mutex_);
  constexpr double kLongest = 1e9;  // what a clock can count
  find(name).stay_s = std::min(seconds, kLongest);
  news_.notify_all();
}

double ModelSet::default_stay(const Slot& slot) const {
  const double seconds = slot.spec.unload_after_s.value_or(options_.unload_after_s);
  return seconds > 0 ? seconds : -1;
}

std::optional<ModelSet::Clock::time_point> ModelSet::expiry(const Slot& slot) const {
  if (!slot.model || slot.leases > 0 || slot.spec.keep) return std::nullopt;
  if (slot.unload_wanted) return Clock::time_point();
  if (slot.stay_s < 0) return std::nullopt;
  return slot.last_used +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(slot.stay_s));
}

// ---------------------------------------------------------------- what there is

ModelSet::Status ModelSet::status_of(const Slot& slot) const {
  Status s{.name = slot.spec.name,
           .aliases = slot.spec.aliases,
           .adapters = slot.adapters,
           .path = slot.spec.engine.model,
           .state = slot.unload_wanted && slot.model ? State::kUnloading : slot.state,
           .keep = slot.spec.keep,
           .pulled = slot.spec.pulled,
           .leases = slot.leases,
           .file = slot.file,
           .own_memory = slot.own_memory,
           .memory_bytes = slot.main_memory,
           .loads = slot.loads,
           .failed_loads = slot.failed_loads,
           .last_error = slot.last_error};
  if (!slot.model) return s;
  s.info = slot.model->info();
  const ModelInfo::Memory& m = s.info->memory;
  s.memory_bytes = m.weights_mapped + m.weights_copied + m.workspace + m.kv_pool;
  s.format = std::string(slot.model->format().name());
  s.loaded_at = slot.model->loaded_at();
  if (const auto at = expiry(slot)) {
    s.unload_in_s = std::max(0.0, std::chrono::duration<double>(*at - Clock::now()).count());
  } else if (!slot.spec.keep && slot.stay_s >= 0) {
    s.unload_in_s = slot.stay_s;
  }
  return s;
}

std::vector<ModelSet::Status> ModelSet::list() const {
  const std::lock_guard lock(mutex_);
  std::vector<Status> all;
  for (const std::unique_ptr<Slot>& slot : slots_) all.push_back(status_of(*slot));
  return all;
}

ModelSet::Status ModelSet::status(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return status_of(find(name));
}

EngineStats ModelSet::stats_of(const Slot& slot) const {
  EngineStats sum = slot.past;
  if (slot.model) add_stats(sum, slot.model->engine().stats());
  return sum;
}

EngineStats ModelSet::stats(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  return stats_of(find(name));
}

EngineStats ModelSet::stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats sum = dropped_;
  for (const std::unique_ptr<Slot>& slot : slots_) add_stats(sum, stats_of(*slot));
  return sum;
}

std::string ModelSet::fallback() const {
  const std::lock_guard lock(mutex_);
  for (const std::unique_ptr<Slot>& slot : slots_) {
    if (!slot->model) continue;
    if (std::string fallback = slot->model->engine().fallback(); !fallback.empty()) return fallback;
  }
  return {};
}

std::string ModelSet::failure() const {
  const std::lock_guard lock(mutex_);
  for (const std::unique_ptr<Slot>& slot : slots_) {
    if (!slot->model) continue;
    if (std::string failure = slot->model->engine().failure(); !failure.empty()) return failure;
  }
  return {};
}

}  // namespace millrace::server
