// The ModelSet's own thread: loads what is asked for, one after the other, makes room for it, and unloads
// what has been idle for long. model_set.cpp has what requests call.
#include <fmt/core.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <new>

#include "base/error.h"
#include "engine/stats_sum.h"
#include "model_errors.h"
#include "model_set.h"
#include "model_text.h"

namespace millrace::server {

void ModelSet::adopt(const std::string& name, std::unique_ptr<Engine> engine) {
  const std::lock_guard lock(mutex_);
  Slot& slot = find(name);
  const ModelInfo::Memory& m = engine->model().memory;
  put(slot, {.model = std::make_shared<ServedModel>(slot.spec.name, std::move(engine), options_.open_objects),
             .main_memory = m.weights_mapped + m.weights_copied + m.workspace + m.kv_pool});
  news_.notify_all();
}

void ModelSet::put(Slot& slot, Opened opened) {
  if (const std::string_view note = opened.model->format().note(); !note.empty()) {
    log_.write("warn", note, {{"model", slot.spec.name}});
  }
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
  if (!check_model_text(slot.spec.engine.model)) {
    log_.write("warn", kNoTemplate, {{"model", slot.spec.name}});
  }
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

// A client that has its answer may ask for another model before the lease behind the answer has ended.
constexpr std::chrono::seconds kLeaseEnds{1};

ModelPlan ModelSet::make_room(const Slot& slot) {
  const auto until = std::chrono::steady_clock::now() + kLeaseEnds;
  const auto some_lease_ends = [&](std::unique_lock<std::mutex>& lock) {
    return !stopping_ && news_.wait_until(lock, until) == std::cv_status::no_timeout;
  };
  const auto loaded = [](const std::unique_ptr<Slot>& s) { return s->model != nullptr; };
  while (true) {
    std::unique_lock lock(mutex_);
    const auto count = std::count_if(slots_.begin(), slots_.end(), loaded);
    if (options_.max_models > 0 && count >= options_.max_models) {
      const std::string why =
          fmt::format("{} may be loaded at the same time (--max-models)", options_.max_models);
      if (!unload_oldest(lock, [](const Slot&) { return true; }) && !some_lease_ends(lock))
        throw busy_error(slot.spec, why);
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
    if (in_use && some_lease_ends(lock)) continue;
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

}  // namespace millrace::server
