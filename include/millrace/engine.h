// The engine: one model, any number of clients. Requests go in from any thread; each answers with a stream of
// events. A request's tokens do not depend on what else is running.
//
//   auto engine = millrace::Engine::create({.model = "model.gguf"});
//   auto stream = engine->submit({.text = "Once upon a time", .max_tokens = 50});
//   while (auto event = stream.next()) std::cout << event->text << std::flush;
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "millrace/error.h"
#include "millrace/request.h"
#include "millrace/stats.h"

namespace millrace {

enum class Speculation {
  kOff,
  kLookup,  // drafts are what followed the same tokens earlier in the request
  kDraft,   // drafts come from a small model with the same vocabulary
};

struct EngineOptions {
  std::string model = {};  // GGUF file or Hugging Face directory
  // cpu, cuda, cuda:1 (another GPU), reference; auto: a GPU if there is one with room for the model, else the
  // CPU (ModelInfo::device_note says why).
  std::string device = "cpu";
  double gpu_memory = 0.9;   // of a GPU's free memory, how much may be taken
  int threads = 0;           // 0: all that this process may use
  int32_t context = 0;       // tokens per sequence; 0: what the model was trained for, at most 4096
  std::string kv_type = {};  // f32, f16, bf16, int8, fp8; empty: the device's
  std::string quantize =
      {};  // the weights, while they are loaded: int8, int4, q4_k, ..., auto; empty: as they are
  // For quantize "auto": what the weights may take, 4.5bpw (bits per weight) or 800M, and a text to measure
  // by (not its name; empty: a built-in one).
  std::string quantize_budget = {}, quantize_sample = {};
  bool lock = false;             // keep weights and cache in memory: nothing is paged out
  int32_t max_running = 64;      // samples in flight
  int32_t max_waiting = 100000;  // requests; more are answered with kBusy
  int32_t step_tokens = 0;       // rows per step: longer prompts go in chunks of this; 0: the device's
  // While others decode, a prompt's chunk takes about so long: what it may delay their tokens by.
  double chunk_s = 0.25;
  // Tokens the main pool holds, all sequences together; 0: max_running contexts or what kv_bytes allows.
  int64_t kv_tokens = 0;
  size_t kv_bytes = 0;  // most memory for the main pool; 0: half of what is available, on a GPU all of it
  double ageing = 0.1;  // levels of priority gained per second of waiting
  bool prefix_cache = true;

  size_t ram_tier_bytes = 0;  // blocks that left the main pool: preempted or cached; 0: no such tier
  std::string kv_dir = {};    // blocks on disk, found again after a restart; empty: no such tier
  size_t kv_dir_bytes = size_t{8} << 30;

  Speculation speculation = Speculation::kOff;
  std::string draft_model = {};  // for kDraft
  int32_t max_draft = 8;         // tokens

  std::function<void(size_t done, size_t total)> on_load = {};  // bytes
};

struct ModelInfo {
  std::string name = {}, architecture = {}, device = {};
  // What there is to say of the device: why auto is not a GPU, why a tuning file is not used. Most often
  // nothing.
  std::string device_note = {};
  int32_t vocab = 0;
  int32_t context = 0;  // of this engine
  int32_t trained_context = 0;
  int32_t embedding_size = 0;  // 0: this device gives none
  std::vector<int32_t> end_tokens = {};
  bool has_tokenizer = false, has_chat_template = false;
  std::string chat_template_error = {};  // why the model's template cannot be used; empty when it can

  struct Sampling {  // what the model's makers advise, where they do
    std::optional<float> temperature, top_p, min_p, repetition_penalty;
    std::optional<int32_t> top_k;
  } sampling = {};

  std::string quantized = {};  // what quantize "auto" chose and is expected to cost, in words

  struct Memory {               // bytes, as planned and allocated at the start
    size_t weights_mapped = 0;  // read where they lie in the file
    size_t weights_copied = 0;  // repacked, or on a device of its own
    size_t workspace = 0;
    size_t kv_pool = 0;
    size_t available = 0;  // what the machine still had for us when all this was there
  } memory = {};
};

// The answer to one request. May be moved to another thread; destroying it cancels what is still running.
class EventStream {
 public:
  struct State;
  explicit EventStream(std::shared_ptr<State> state);
  ~EventStream();
  EventStream(EventStream&&) noexcept;
  EventStream& operator=(EventStream&&) noexcept;

  uint64_t id() const;
  uint64_t seed() const;  // of sample 0, for those who gave none
  // The next event, in order; waits for it. Nothing once the last event of every sample has been taken.
  std::optional<Event> next();
  std::optional<Event> next_for(std::chrono::milliseconds timeout);  // also nothing when none came
  bool done() const;                                                 // every event has been taken
  void cancel();                       // takes effect at the next step; kCancelled events follow
  void cancel_sample(int32_t sample);  // that one alone, once it has given a token; the others go on
  // `notify` is called once for every time the stream stops being empty, from the engine's thread (and now,
  // when it is not empty): it must return soon and must not call into this stream or the engine.
  void on_ready(std::function<void()> notify);

 private:
  std::shared_ptr<State> state_;
};

class Engine {
 public:
  // Loads everything. Throws Error.
  static std::unique_ptr<Engine> create(EngineOptions options);
  ~Engine();  // shutdown(false)
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Throws Error{kBadInput} for a request that cannot be served as it is written. One that comes when too
  // many wait, or after shutdown, is answered with a kFailed event (kBusy).
  EventStream submit(const Request& request);
  void cancel(uint64_t id);  // no effect on one that has ended

  EngineStats stats() const;
  // Why nobody can be answered any more: the device failed, and stays failed. Empty while all is well. What
  // runs and what is submitted then ends with a kFailed event that says the same (kDevice).
  std::string failure() const;
  const ModelInfo& model() const;

  // What the model's own tokenizer and chat template make of a text. Throw Error where the model has none.
  std::vector<int32_t> tokenize(std::string_view text, bool add_special = true,
                                bool parse_special = true) const;
  std::string detokenize(const std::vector<int32_t>& tokens, bool show_special = false) const;
  std::string token_text(int32_t token) const;  // its bytes, special tokens by name; may be no valid UTF-8
  bool is_special(int32_t token) const;         // a control token: part of no text
  std::string render_chat(const std::vector<ChatMessage>& messages) const;
  // The template's variables as a JSON object: messages, tools, ... What is absent of bos_token, eos_token
  // and add_generation_prompt is added.
  std::string render_chat_json(std::string_view variables) const;

  // No more requests; those accepted are finished (drain) or cancelled. Returns when the engine is still.
  void shutdown(bool drain);

 private:
  class Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace millrace
