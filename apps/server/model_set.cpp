#include "model_set.h"

#include <fmt/format.h>
#include <sys/prctl.h>

#include <algorithm>

#include "base/error.h"
#include "stats_sum.h"

namespace millrace::server {
namespace {

constexpr int kRetryBusyS = 5;  // until somebody may have finished

// A reason as clients may read it: files are called by the name of their model.
std::string public_reason(std::string text, const ModelSpec& spec) {
  for (const std::string* path : {&spec.engine.model, &spec.engine.draft_model, &spec.engine.kv_dir}) {
    if (path->empty()) continue;
    for (size_t at = 0; (at = text.find(*path, at)) != std::string::npos; at += spec.name.size()) {
      text.replace(at, path->size(), spec.name);
    }
  }
  return without_paths(text);
}

ApiError load_error(const ModelSpec& spec, ErrorCode code, const std::string& reason) {
  const bool memory = code == ErrorCode::kNoMemory;
  return {memory ? 503 : 500,
          fmt::format("the model '{}' cannot be loaded: {}", spec.name, public_reason(reason, spec)), "model",
          memory ? "out_of_memory" : "model_load_failed"};
}

ApiError busy_error(const ModelSpec& spec, const std::string& why) {
  ApiError error(503,
                 fmt::format("the model '{}' cannot be loaded now: {}, and the models that are loaded are in "
                             "use",
                             spec.name, why),
                 "model", "models_busy");
  error.retry_after_s = kRetryBusyS;
  return error;
}

ApiError stopping_error() {
  ApiError error(503, "the server is shutting down", "", "shutting_down");
  error.retry_after_s = 1;
  return error;
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
  std::vector<std::string> names = aliases;
  names.push_back(spec.name);
  for (const std::string& name : names) {
    if (name.empty()) throw_error(ErrorCode::kBadInput, "models: found an empty name");
    if (known(name) == nullptr) continue;
    throw_error(ErrorCode::kBadInput, "models: found the name '{}' twice, expected each once", name);
  }
  auto slot = std::make_unique<Slot>();
  slot->file = std::move(file);
  if (!slot->file.error.empty()) {
    slot->last_error = public_reason(slot->file.error, spec);
    log_.write("warn", "not a model", {{"model", spec.name}, {"reason", slot->file.error}});
  }
  slot->spec = std::move(spec);
  slots_.push_back(std::move(slot));
}

void ModelSet::take(const std::string& name, const std::string& path) {
  ModelSpec spec{.name = name, .engine = options_.defaults};
  spec.engine.model = path;
  // A name may have slashes in it.
  if (!spec.engine.kv_dir.empty())
    spec.engine.kv_dir += fmt::format("/{:016x}", std::hash<std::string>()(name));
  ModelFile file = read_model_file(path);
  const std::lock_guard lock(mutex_);
  add(std::move(spec), std::move(file));
  log_.write("info", "model taken in", {{"model", name}});
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

void ModelSet::look_again(std::unique_lock<std::mutex>& lock) {
  rescan_wanted_ = false;
  lock.unlock();
  std::vector<ModelSpec> found;
  try {
    found = find_all();
  } catch (const std::exception& error) {
    log_.write("error", "models not read again", {{"reason", std::string(error.what())}});
  }
  for (ModelSpec& spec : found) {
    if (has(spec.name)) continue;
    const std::string name = spec.name;
    ModelFile file = read_model_file(spec.engine.model);
    const std::lock_guard again(mutex_);
    try {
      add(std::move(spec), std::move(file));
      log_.write("info", "model found", {{"model", name}});
    } catch (const Error& error) {
      log_.write("error", "model not taken", {{"model", name}, {"reason", std::string(error.what())}});
    }
  }
  lock.lock();
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
  }
  return nullptr;
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
  return slot.model ? make_lease(slot) : nullptr;
}

void ModelSet::load(const std::string& name, Done done) {
  ModelLease loaded;
  {
    const std::lock_guard lock(mutex_);
    Slot& slot = find(name);
    if (slot.model) {
      loaded = make_lease(slot);
    } else if (!stopping_) {
      slot.waiting.push_back(std::move(done));
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
           .path = slot.spec.engine.model,
           .state = slot.unload_wanted && slot.model ? State::kUnloading : slot.state,
           .keep = slot.spec.keep,
           .leases = slot.leases,
           .file = slot.file,
           .loads = slot.loads,
           .failed_loads = slot.failed_loads,
           .last_error = slot.last_error};
  if (!slot.model) return s;
  s.info = slot.model->info();
  s.own_memory = slot.own_memory;
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
  EngineStats sum;
  for (const std::unique_ptr<Slot>& slot : slots_) add_stats(sum, stats_of(*slot));
  return sum;
}

std::string ModelSet::failure() const {
  const std::lock_guard lock(mutex_);
  for (const std::unique_ptr<Slot>& slot : slots_) {
    if (!slot->model) continue;
    if (std::string failure = slot->model->engine().failure(); !failure.empty()) return failure;
  }
  return {};
}

// ---------------------------------------------------------------- loading and unloading

void ModelSet::adopt(const std::string& name, std::unique_ptr<Engine> engine) {
  const std::lock_guard lock(mutex_);
  Slot& slot = find(name);
  const ModelInfo::Memory& m = engine->model().memory;
  put(slot, {.model = std::make_shared<ServedModel>(slot.spec.name, std::move(engine), options_.open_objects),
             .main_memory = m.weights_mapped + m.weights_copied + m.workspace + m.kv_pool});
  news_.notify_all();
}

void ModelSet::put(Slot& slot, Opened opened) {
  slot.model = std::move(opened.model);
  slot.main_memory = opened.main_memory;
  slot.own_memory = opened.own_memory;
  slot.state = State::kLoaded;
  slot.last_used = Clock::now();
  slot.stay_s = default_stay(slot);
  slot.unload_wanted = false;
  slot.last_error.clear();
  ++slot.loads;
}

void ModelSet::run() {
  ::prctl(PR_SET_NAME, "models");
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    std::optional<Clock::time_point> next;
    Slot* oldest = nullptr;
    for (const std::unique_ptr<Slot>& slot : slots_) {
      const std::optional<Clock::time_point> at = expiry(*slot);
      if (!at || (next && *next <= *at)) continue;
      next = at;
      oldest = slot.get();
    }
    if (oldest != nullptr && *next <= Clock::now()) {
      unload(*oldest, lock);
    } else if (rescan_wanted_) {
      look_again(lock);
    } else if (!queue_.empty()) {
      load_next(lock);
    } else if (next) {
      news_.wait_until(lock, *next);
    } else {
      news_.wait(lock);
    }
  }
  std::vector<Done> waiting;
  for (const std::unique_ptr<Slot>& slot : slots_) {
    std::move(slot->waiting.begin(), slot->waiting.end(), std::back_inserter(waiting));
    slot->waiting.clear();
  }
  lock.unlock();
  for (const Done& done : waiting) done(nullptr, stopping_error());
}

void ModelSet::load_next(std::unique_lock<std::mutex>& lock) {
  Slot& slot = *queue_.front();
  queue_.pop_front();
  slot.state = State::kLoading;
  lock.unlock();
  Opened opened;
  std::optional<ApiError> error;
  std::string reason;  // for the log, with paths
  const Clock::time_point start = Clock::now();
  try {
    opened = open(slot);
  } catch (const ApiError& refused) {
    error = refused;
    reason = refused.message;
  } catch (const Error& failed) {
    error = load_error(slot.spec, failed.code(), failed.what());
    reason = failed.what();
  } catch (const std::bad_alloc&) {
    reason = "out of memory";
    error = load_error(slot.spec, ErrorCode::kNoMemory, reason);
  } catch (const std::exception& failed) {
    error = load_error(slot.spec, ErrorCode::kInternal, "internal error");
    reason = failed.what();
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (error) {
    log_.write("error", "model not loaded", {{"model", slot.spec.name}, {"reason", reason}});
  } else {
    log_.write("info", "model loaded",
               {{"model", slot.spec.name},
                {"device", opened.model->info().device},
                {"seconds", seconds},
                {"bytes", static_cast<double>(opened.main_memory)}});
  }
  lock.lock();
  if (error) {
    slot.state = State::kUnloaded;
    slot.last_error = error->message;
    ++slot.failed_loads;
  } else {
    put(slot, std::move(opened));
  }
  std::vector<std::pair<Done, ModelLease>> told;
  for (Done& done : slot.waiting) told.emplace_back(std::move(done), error ? nullptr : make_lease(slot));
  slot.waiting.clear();
  lock.unlock();
  for (auto& [done, lease] : told) done(std::move(lease), error);
  told.clear();
  lock.lock();
}

ModelSet::Opened ModelSet::open(const Slot& slot) {
  ModelPlan plan = make_room(slot);
  plan.options.on_load = [this](size_t, size_t) {
    if (stopping_) throw stopping_error();
  };
  auto engine = Engine::create(plan.options);
  return {.model = std::make_shared<ServedModel>(slot.spec.name, std::move(engine), options_.open_objects),
          .main_memory = plan.main_memory,
          .own_memory = plan.own_memory};
}

size_t ModelSet::committed() const {
  size_t bytes = 0;
  for (const std::unique_ptr<Slot>& slot : slots_) bytes += slot->model ? slot->main_memory : 0;
  return bytes;
}

ModelPlan ModelSet::make_room(const Slot& slot) {
  const auto loaded = [](const std::unique_ptr<Slot>& s) { return s->model != nullptr; };
  while (true) {
    std::unique_lock lock(mutex_);
    const auto count = std::count_if(slots_.begin(), slots_.end(), loaded);
    if (options_.max_models > 0 && count >= options_.max_models) {
      const std::string why =
          fmt::format("{} may be loaded at the same time (--max-models)", options_.max_models);
      if (!unload_oldest(lock, [](const Slot&) { return true; })) throw busy_error(slot.spec, why);
      continue;
    }
    const size_t taken = committed();
    const bool device_taken = std::any_of(slots_.begin(), slots_.end(), [](const std::unique_ptr<Slot>& s) {
      return s->model && s->own_memory && s->leases == 0 && !s->spec.keep;
    });
    lock.unlock();
    const size_t all = options_.memory_bytes > 0 ? options_.memory_bytes : memory_for_models();
    ModelPlan plan = plan_model(slot.spec.engine, all > taken ? all - taken : 0, device_taken);
    if (plan.does_not_fit.empty()) return plan;
    lock.lock();
    const auto helps = [&](const Slot& other) { return other.own_memory == plan.short_of_device; };
    if (unload_oldest(lock, helps)) continue;
    const bool in_use = std::any_of(slots_.begin(), slots_.end(), [&](const std::unique_ptr<Slot>& s) {
      return s->model && !s->spec.keep && helps(*s);
    });
    if (in_use) throw busy_error(slot.spec, plan.does_not_fit);
    // Alone it may try: what is mapped and not in memory is read from the file again.
    if (taken == 0 && !plan.short_of_device && options_.memory_bytes == 0) {
      plan.options = slot.spec.engine;
      return plan;
    }
    throw Error(ErrorCode::kNoMemory, plan.does_not_fit);
  }
}

bool ModelSet::unload_oldest(std::unique_lock<std::mutex>& lock,
                             const std::function<bool(const Slot&)>& helps) {
  Slot* oldest = nullptr;
  for (const std::unique_ptr<Slot>& slot : slots_) {
    if (!slot->model || slot->leases > 0 || slot->spec.keep || !helps(*slot)) continue;
    if (oldest == nullptr || slot->last_used < oldest->last_used) oldest = slot.get();
  }
  if (oldest == nullptr) return false;
  unload(*oldest, lock);
  return true;
}

void ModelSet::unload(Slot& slot, std::unique_lock<std::mutex>& lock) {
  const EngineStats last = counters_of(slot.model->engine().stats());
  ModelLease model = std::move(slot.model);
  add_stats(slot.past, last);
  slot.state = State::kUnloading;
  slot.unload_wanted = false;
  lock.unlock();
  model.reset();
  log_.write("info", "model unloaded", {{"model", slot.spec.name}});
  lock.lock();
  slot.main_memory = 0;
  slot.own_memory = false;
  slot.state = slot.waiting.empty() ? State::kUnloaded : State::kLoading;
}

}  // namespace millrace::server
