// The public face: options become replicas; clients' calls become jobs in their inboxes.
#include "millrace/engine.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/json_tree.h"
#include "base/processor_energy.h"
#include "engine/available_memory.h"
#include "engine/engine_options.h"
#include "engine/fim_tokens.h"
#include "engine/render_chat.h"
#include "engine/replica.h"
#include "engine/replica_router.h"
#include "engine/stats_sum.h"

namespace millrace {
namespace {

constexpr size_t kMaxVariableDepth = 128;  // a conversation around JSON of a hundred levels

}  // namespace

class Engine::Impl {
 public:
  explicit Impl(EngineOptions options) : options_(std::move(options)) {
    check_options(options_);
    for (ReplicaSetup& setup : replica_setups(options_)) {
      replicas_.push_back(std::make_unique<Replica>(std::move(setup)));
    }
    runtime_ = &replicas_.front()->runtime();
    read_info();
    const auto blocks = static_cast<size_t>(runtime_->spec().kv_groups.front().num_blocks);
    if (replicas_.size() > 1) router_.emplace(options_.data_parallel, blocks, options_.max_running);
  }

  EventStream submit(const Request& request) {
    size_t chosen = 0;
    std::shared_ptr<Job> job =
        make_job(*runtime_, runtime_->cache(), chat_template_, request, options_.max_running,
                 next_id_.fetch_add(1), [&](const kv::Prompt& prompt) {
                   chosen = route(prompt);
                   return replicas_[chosen]->inbox();
                 });
    const std::shared_ptr<EventStream::State> state = job->events;
    const std::string refusal = replicas_[chosen]->take(std::move(job));
    for (int32_t i = 0; !refusal.empty() && i < request.samples; ++i) {
      Event event;
      event.kind = Event::Kind::kFailed;
      event.finish = FinishReason::kError;
      event.code = ErrorCode::kBusy;
      event.error = refusal;
      event.sample = i;
      state->finish(std::move(event));
    }
    return EventStream(state);
  }

  void cancel(uint64_t id) {  // those who do not know it do nothing
    for (const auto& replica : replicas_) replica->inbox()->cancel(id);
  }

  std::string failure() const {
    for (const auto& replica : replicas_) {
      if (std::string failure = replica->failure(); !failure.empty()) return failure;
    }
    return {};
  }

  EngineStats stats() const {
    EngineStats stats = replicas_.front()->stats();
    for (size_t i = 1; i < replicas_.size(); ++i) add_stats(stats, replicas_[i]->stats());
    if (const auto joules = processor_energy_.joules()) stats.energy_joules["processors"] = *joules;
    return stats;
  }

  std::string fallback() const {
    for (const auto& replica : replicas_) {
      const std::shared_ptr<Inbox> inbox = replica->inbox();
      const std::lock_guard lock(inbox->mutex);
      if (!inbox->fallback.empty()) return inbox->fallback;
    }
    return {};
  }

  void shutdown(bool drain) {
    for (const auto& replica : replicas_) replica->shutdown(drain);
  }

  std::string render(nlohmann::ordered_json variables) const {
    if (chat_template_ == nullptr) {
      if (!template_error_.empty()) throw Error(ErrorCode::kUnsupported, template_error_);
      throw_error(ErrorCode::kBadInput, "{}: has no chat template", options_.model);
    }
    return millrace::render_chat(*chat_template_, runtime_->tokenizer(), std::move(variables));
  }

  const EngineOptions options_;
  std::vector<std::unique_ptr<Replica>> replicas_;
  Runtime* runtime_ = nullptr;  // the first one's: what it says of the model is true of all
  const ChatTemplate* chat_template_ = nullptr;
  std::string template_error_;
  ModelInfo info_;
  mutable ProcessorEnergy processor_energy_;  // locks for itself

 private:
  void read_info() {
    const ModelConfig& config = runtime_->config();
    // A template this build cannot read is an error for those who send messages only.
    try {
      chat_template_ = runtime_->chat_template();
    } catch (const Error& error) {
      template_error_ = error.what();
    }
    info_ = {.name = config.name,
             .architecture = config.architecture,
             .device = runtime_->backend().description(),
             .device_note = runtime_->device_note(),
             .vocab = config.vocab,
             .context = runtime_->context(),
             .trained_context = config.context_length,
             .max_samples = options_.max_running,
             .embedding_size = runtime_->backend().gives_hidden_states() ? config.hidden : 0,
             .encoder = config.encoder,
             .pooling = runtime_->pooling(),
             .labels = config.head.labels,
             .score_sigmoid = config.head.labels > 0 && config.head.sigmoid,
             .images = runtime_->images(),
             .end_tokens = runtime_->end_tokens(),
             .adapters = runtime_->adapter_names(),
             .has_tokenizer = runtime_->has_tokenizer(),
             .has_chat_template = chat_template_ != nullptr,
             .chat_template_error = template_error_,
             .sampling = {.temperature = config.sampling.temperature,
                          .top_p = config.sampling.top_p,
                          .min_p = config.sampling.min_p,
                          .repetition_penalty = config.sampling.repetition_penalty,
                          .top_k = config.sampling.top_k}};
    const WeightBytes weights =
        plan_weights(runtime_->checkpoint(), config, runtime_->backend(), runtime_->weight_types().choice);
    info_.quantized = runtime_->weight_types().note;
    if (runtime_->has_tokenizer() && !config.encoder) {
      info_.infill = find_fim_tokens(runtime_->checkpoint(), runtime_->tokenizer());
    }
    const ExecutorSpec& spec = runtime_->spec();
    info_.memory = {.weights_mapped = weights.mapped,
                    .weights_copied = weights.repacked + weights.dequantized + runtime_->adapter_bytes(),
                    .workspace = runtime_->backend().workspace_bytes(spec) + image_workspace(),
                    .available = runtime_->backend().own_memory().value_or(available_memory())};
    for (size_t g = 0; g < spec.kv_groups.size(); ++g) {
      info_.memory.kv_pool +=
          spec.kv_block_bytes(static_cast<int>(g)) * static_cast<size_t>(spec.kv_groups[g].num_blocks);
    }
    if (replicas_.size() > 1) {  // they share what is mapped
      info_.memory.weights_copied *= replicas_.size();
      info_.memory.workspace *= replicas_.size();
      info_.memory.kv_pool *= replicas_.size();
      info_.device = fmt::format("{} replicas, each {}", replicas_.size(), info_.device);
    }
  }

  size_t image_workspace() const {
    return runtime_->image_reader() == nullptr ? 0 : runtime_->image_reader()->tower().workspace_bytes();
  }

  size_t route(const kv::Prompt& prompt) {
    if (!router_) return 0;
    const std::lock_guard lock(router_mutex_);
    std::vector<int64_t> loads;
    std::vector<bool> away;
    for (const auto& replica : replicas_) {
      loads.push_back(replica->load());
      away.push_back(replica->away());
    }
    return static_cast<size_t>(router_->choose(prompt.keys, loads, away));
  }

  std::atomic<uint64_t> next_id_{1};
  std::mutex router_mutex_;
  std::optional<ReplicaRouter> router_;
};

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;

std::unique_ptr<Engine> Engine::create(EngineOptions options) {
  return std::unique_ptr<Engine>(new Engine(std::make_unique<Impl>(std::move(options))));
}

EventStream Engine::submit(const Request& request) { return impl_->submit(request); }
void Engine::cancel(uint64_t id) { impl_->cancel(id); }
std::string Engine::failure() const { return impl_->failure(); }
std::string Engine::fallback() const { return impl_->fallback(); }

EngineStats Engine::stats() const {
  EngineStats stats = impl_->stats();
  const BufferPoolStats pool = buffer_pool().stats();
  stats.memory = {.in_use = pool.in_use,
                  .peak = pool.peak,
                  .reserved = pool.reserved,
                  .fragmentation = pool.fragmentation(),
                  .system_calls = pool.system_calls};
  return stats;
}
const ModelInfo& Engine::model() const { return impl_->info_; }
void Engine::shutdown(bool drain) { impl_->shutdown(drain); }

std::vector<int32_t> Engine::tokenize(std::string_view text, bool add_special, bool parse_special,
                                      size_t max_tokens) const {
  return impl_->runtime_->tokenizer().encode(
      text, {.add_special = add_special, .parse_special = parse_special, .max_tokens = max_tokens});
}

Engine::Pair Engine::tokenize_pair(std::string_view first, std::string_view second, size_t max_tokens) const {
  const Tokenizer& tokenizer = impl_->runtime_->tokenizer();
  Pair pair{.tokens = tokenizer.encode(first, {.parse_special = false, .max_tokens = max_tokens})};
  std::vector<int32_t> behind = tokenizer.encode(second, {.parse_special = false, .max_tokens = max_tokens});
  // What stands before a text ([CLS]) is there once; what ends one ([SEP]) ends each.
  const auto prefix = tokenizer.encode("", {.parse_special = false});
  const bool leads = prefix.size() > 1 && !behind.empty() && behind.front() == prefix.front();
  pair.second_text = static_cast<int32_t>(pair.tokens.size());
  pair.tokens.insert(pair.tokens.end(), behind.begin() + (leads ? 1 : 0), behind.end());
  return pair;
}

size_t Engine::image_tokens(std::string_view file) const {
  const Runtime& runtime = *impl_->runtime_;
  if (runtime.image_reader() == nullptr)
    throw_error(ErrorCode::kUnsupported, "images: {}", runtime.images().refusal);
  return static_cast<size_t>(runtime.image_reader()->grid_of(file).tokens);
}
size_t Engine::min_tokens(std::string_view text) const {
  return impl_->runtime_->tokenizer().min_tokens(text);
}

std::string Engine::detokenize(const std::vector<int32_t>& tokens, bool show_special) const {
  return impl_->runtime_->tokenizer().decode(tokens, show_special);
}

std::string Engine::token_text(int32_t token) const {
  return impl_->runtime_->tokenizer().token_bytes(token, true);
}

bool Engine::is_special(int32_t token) const { return impl_->runtime_->tokenizer().is_special(token); }

std::string Engine::render_chat(const std::vector<ChatMessage>& messages) const {
  return impl_->render({{"messages", to_json(messages)}});
}

std::string Engine::render_chat_json(std::string_view variables) const {
  nlohmann::ordered_json parsed;
  try {
    parsed = parse_json_tree(variables, {.depth = kMaxVariableDepth, .last_key_wins = true});
  } catch (const JsonTextError& error) {
    throw_error(ErrorCode::kBadInput, "chat template variables: {}", error.what());
  }
  if (!parsed.is_object()) {
    throw_error(ErrorCode::kBadInput, "chat template variables: found no JSON object, expected one");
  }
  return impl_->render(std::move(parsed));
}

}  // namespace millrace
