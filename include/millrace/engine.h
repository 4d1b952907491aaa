// The engine: one model, any number of clients. Requests go in from any thread; each is answered by a stream
// of events. A request's tokens do not depend on what else is running.
//
//   auto engine = millrace::Engine::create({.model = "model.gguf"});
//   auto events = engine->submit({.text = "Once upon a time", .max_tokens = 50});
//   while (auto event = events.next()) std::cout << event->text << std::flush;
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
#include "millrace/options.h"
#include "millrace/request.h"
#include "millrace/stats.h"

namespace millrace {

struct ModelInfo {
  std::string name = {}, architecture = {}, device = {};
  // What there is to say of the device: why auto is not a GPU, why a tuning file is not used. Most often
  // nothing.
  std::string device_note = {};
  int32_t vocab = 0;
  int32_t context = 0;  // of this engine
  int32_t trained_context = 0;
  int32_t max_samples = 0;           // of one request
  int32_t embedding_size = 0;        // 0: this device gives none
  bool encoder = false;              // embeddings are all that it gives
  Pooling pooling = Pooling::kMean;  // what its makers use
  int32_t labels = 0;                // of its classification head (Pooling::kScores); 0: it has none
  bool score_sigmoid = false;        // a score is to be seen as 1 / (1 + e^-score)
  struct Images {
    int32_t token = -1;         // behind it in a prompt an image stands; -1: there can be none
    std::string refusal = {};   // why
    std::string written = {};   // what the chat template writes for one, in a place of which
    std::string expanded = {};  // this belongs: the token, and what is around it
  } images = {};
  std::vector<int32_t> end_tokens = {};
  std::vector<std::string> adapters = {};  // the names that Request::adapter may have
  bool has_tokenizer = false, has_chat_template = false;
  std::string chat_template_error = {};  // why the model's template cannot be used; empty when it can

  struct Sampling {  // what the model's makers advise, where they do
    std::optional<float> temperature, top_p, min_p, repetition_penalty;
    std::optional<int32_t> top_k;
  } sampling = {};

  // Tokens around a gap that the model was trained to fill, where its vocabulary has them; -1: none.
  struct Infill {
    int32_t prefix = -1, suffix = -1, middle = -1;  // each stands before what it is named for
    int32_t repository = -1, file = -1;  // before a repository's name, and before each of its files
    bool suffix_first = false;           // suffix and its text come first, and nothing marks the gap
    std::vector<int32_t> ends = {};      // what ends an answer beside end_tokens
    bool fills() const { return prefix >= 0 && suffix >= 0 && (middle >= 0 || suffix_first); }
  } infill = {};

  std::string quantized = {};  // what packed weights were read as; what quantize "auto" chose, and its cost

  struct Memory {               // bytes, as planned and allocated at the start
    size_t weights_mapped = 0;  // read where they lie in the file
    size_t weights_copied = 0;  // repacked, or on a device of its own
    size_t workspace = 0;
    size_t kv_pool = 0;
    size_t available = 0;  // what the machine still had for us when all this was there
  } memory = {};
};

// The answer to one request, event by event. May be moved to another thread; destroying it cancels what is
// still running.
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
  // `notify` is called once for every time this stops being empty, from the engine's thread (and now,
  // when it is not empty): it must return soon and must not call into this object or the engine.
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
  // Not empty: the device has failed and the CPU has gone on in its place (EngineOptions::fallback), and why.
  // Requests that ran were computed again from the tokens they had.
  std::string fallback() const;
  const ModelInfo& model() const;

  // What the model's own tokenizer and chat template make of a text. Throw Error where the model has none.
  // Stops once more than `max_tokens` have come out.
  std::vector<int32_t> tokenize(std::string_view text, bool add_special = true, bool parse_special = true,
                                size_t max_tokens = SIZE_MAX) const;
  // Tokens that an image takes in a prompt, beside ModelInfo::Images::token. Throws Error where the model
  // takes none, and for a file that is no picture where that counts.
  size_t image_tokens(std::string_view file) const;
  // Two texts as a cross-encoder was trained on them, and where the second begins (Request::second_text).
  struct Pair {
    std::vector<int32_t> tokens = {};
    int32_t second_text = 0;
  };
  Pair tokenize_pair(std::string_view first, std::string_view second, size_t max_tokens = SIZE_MAX) const;
  // So many tokens at least, from a look at the bytes alone: what cannot fit is known before it is tokenized.
  size_t min_tokens(std::string_view text) const;
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
