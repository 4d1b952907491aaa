// From a request as written to a job the engine can take: checked and tokenized on the client's own thread.
#include "engine/job.h"

#include <algorithm>

#include "base/error.h"
#include "engine/available_memory.h"
#include "engine/fp8_names.h"
#include "engine/render_chat.h"

namespace millrace {
namespace {

// Puts the tokens of images behind those that announce them, and says where they are.
std::vector<int32_t> with_images(const Runtime& runtime, const Request& request,
                                 const std::vector<int32_t>& tokens, std::vector<ImagePlace>& places) {
  const int32_t announces = runtime.images().token;
  const auto found = std::count(tokens.begin(), tokens.end(), announces);
  if (found != std::ssize(request.images)) {
    throw_error(ErrorCode::kBadInput,
                "images: found {} with {} places for them in the prompt, expected as many",
                request.images.size(), found);
  }
  std::vector<int32_t> out;
  for (const int32_t token : tokens) {
    out.push_back(token);
    if (token != announces) continue;
    const std::string& file = *request.images[places.size()];
    const ImageGrid grid = runtime.image_reader()->grid_of(file);
    const std::vector<int32_t> ids = runtime.image_reader()->ids_of(file, grid);
    places.push_back({.first = static_cast<int32_t>(out.size()),
                      .tokens = grid.tokens,
                      .rows = nullptr,
                      .down = grid.rows,
                      .across = grid.columns});
    out.insert(out.end(), ids.begin(), ids.end());
  }
  return out;
}

void check_images(const Runtime& runtime, const Request& request) {
  if (runtime.image_reader() == nullptr)
    throw_error(ErrorCode::kUnsupported, "images: {}", runtime.images().refusal);
  if (request.embedding || request.prompt_logprobs || request.prompt_logits)
    throw_error(
        ErrorCode::kUnsupported,
        "images: found them with a request for embeddings, logprobs or logits of the prompt, expected "
        "a request for an answer");
}

// How many they are is not known: the rest was not looked at.
[[noreturn]] void too_long(const Runtime& runtime) {
  throw PromptTooLong(
      fmt::format("the prompt is too long: this model's maximum context length is {} tokens (it was "
                  "trained for {})",
                  runtime.context(), runtime.config().context_length));
}

std::vector<int32_t> prompt_tokens(const Runtime& runtime, const ChatTemplate* chat_template,
                                   const Request& request) {
  const int kinds = static_cast<int>(!request.tokens.empty()) + static_cast<int>(!request.text.empty()) +
                    static_cast<int>(!request.messages.empty());
  if (kinds != 1) {
    throw_error(ErrorCode::kBadInput, "prompt: found {} of tokens, text and messages, expected exactly one",
                kinds);
  }
  if (!request.tokens.empty()) {
    runtime.check_tokens(request.tokens);
    return request.tokens;
  }
  if (!request.text.empty()) {
    const auto context = static_cast<size_t>(runtime.context());
    if (runtime.tokenizer().min_tokens(request.text) > context) too_long(runtime);
    std::vector<int32_t> tokens = runtime.tokenizer().encode(request.text, {.max_tokens = context});
    if (tokens.size() > context) too_long(runtime);
    return tokens;
  }
  if (chat_template == nullptr) {
    throw_error(ErrorCode::kBadInput, "messages: {} has no chat template, expected text or tokens",
                runtime.checkpoint().path());
  }
  const std::string text =
      render_chat(*chat_template, runtime.tokenizer(), {{"messages", to_json(request.messages)}});
  // The template writes the bos itself.
  return runtime.tokenizer().encode(text, {.add_special = false, .parse_special = true});
}

void check_scores(const Runtime& runtime, const Request& request, size_t tokens) {
  const ModelConfig::Head& head = runtime.config().head;
  if (request.embedding == Pooling::kScores && head.labels == 0)
    throw_error(ErrorCode::kUnsupported,
                "embedding: {} has no classification head, expected none of its scores",
                runtime.config().name);
  if (request.second_text == 0) return;
  if (request.second_text < 0 || static_cast<size_t>(request.second_text) >= tokens) {
    throw_error(ErrorCode::kBadInput, "second_text: found {}, expected 0 to {}", request.second_text,
                tokens - 1);
  }
  if (!runtime.config().encoder)
    throw_error(ErrorCode::kBadInput, "second_text: found one, expected it with text encoders only");
  if (head.pair_types && runtime.backend().lacks().has(OpFeature::kPairs)) {
    throw_error(ErrorCode::kUnsupported,
                "second_text: the device {} has no pairs of texts yet; use --device cpu",
                runtime.backend().name());
  }
}

void check_embedding(const Runtime& runtime, const Request& request) {
  if (!runtime.backend().gives_hidden_states()) {
    throw_error(ErrorCode::kUnsupported,
                "embedding: the device {} gives no hidden states, expected cpu, cuda or reference",
                runtime.backend().name());
  }
  if (request.prompt_logprobs || request.prompt_logits) {
    throw_error(ErrorCode::kBadInput, "embedding: found prompt_{} as well, expected one of them",
                request.prompt_logprobs ? "logprobs" : "logits");
  }
  if (request.samples != 1 || !request.stop.empty() || request.constraint) {
    throw_error(
        ErrorCode::kBadInput,
        "embedding: found {} samples, {} stop strings and {} constraint, expected one and none of the "
        "others",
        request.samples, request.stop.size(), request.constraint ? "a" : "no");
  }
}

// Rows of floats that a client wants whole: more than there is memory for is not begun.
void check_fits(std::string_view what, size_t tokens, int32_t row) {
  const double mib = static_cast<double>(tokens) * row * sizeof(float) / (1 << 20);
  const double available = static_cast<double>(available_memory()) / (1 << 20);
  if (mib <= available) return;
  throw_error(ErrorCode::kNoMemory, "{}: {} tokens of {} numbers are {:.0f} MiB, this machine has {:.0f} MiB",
              what, tokens, row, mib, available);
}

void check(const Runtime& runtime, const Request& request, size_t tokens, int32_t max_running) {
  if (!request.embedding) runtime.check_generates();
  if (tokens == 0) throw_error(ErrorCode::kBadInput, "prompt: found no tokens, expected at least one");
  if (tokens > static_cast<size_t>(runtime.context())) {
    // The words that clients look for, beside the code.
    throw PromptTooLong(
        fmt::format("the prompt is too long: {} tokens; this model's maximum context length is {} tokens (it "
                    "was trained for {})",
                    tokens, runtime.context(), runtime.config().context_length));
  }
  if (request.samples < 1 || request.samples > max_running) {
    throw_error(ErrorCode::kBadInput, "samples: found {}, expected 1 to {}", request.samples, max_running);
  }
  if (request.max_tokens < 0) {
    throw_error(ErrorCode::kBadInput, "max_tokens: found {}, expected 0 (no limit) or more",
                request.max_tokens);
  }
  if (request.prompt_logprobs && (*request.prompt_logprobs < 0 || *request.prompt_logprobs > 1000)) {
    throw_error(ErrorCode::kBadInput, "prompt_logprobs: found {}, expected 0 to 1000",
                *request.prompt_logprobs);
  }
  if (request.prompt_logits) check_fits("prompt_logits", tokens, runtime.config().vocab);
  if (request.embedding == Pooling::kNone) check_fits("embedding", tokens, runtime.config().hidden);
  runtime.check_tokens(request.stop_tokens);
  if (request.embedding) check_embedding(runtime, request);
  check_scores(runtime, request, tokens);
}

}  // namespace

std::shared_ptr<Job> make_job(const Runtime& runtime, const kv::Cache& cache,
                              const ChatTemplate* chat_template, const Request& request, int32_t max_running,
                              uint64_t id, const ChooseInbox& choose) {
  auto job = std::make_shared<Job>();
  job->arrival = std::chrono::steady_clock::now();
  job->adapter = runtime.adapter_number(request.adapter);
  job->sparse_pages = runtime.sparse_pages(request.attention, request.attention_budget);
  job->block_variant = runtime.block_variant(job->adapter, job->sparse_pages);
  if (!request.images.empty()) check_images(runtime, request);
  const std::vector<int32_t> text = prompt_tokens(runtime, chat_template, request);
  const std::vector<int32_t> tokens =
      request.images.empty() ? text : with_images(runtime, request, text, job->images);
  check(runtime, request, tokens.size(), max_running);
  for (size_t i = 0; i < request.images.size(); ++i)
    job->images[i].rows = runtime.image_reader()->rows_of(*request.images[i]);
  // Without a tokenizer tokens still go in and out; only text does not.
  if (runtime.has_tokenizer()) job->tokenizer = runtime.shared_tokenizer();
  if (!request.stop.empty()) runtime.tokenizer();
  job->sampler.emplace(request.sampling, runtime.config().vocab);
  job->sampler->add_prompt(text);
  job->fp8_until = runtime.fp8_until(tokens.size());
  std::vector<int32_t> names;
  if (job->fp8_until > 0) name_tokens(tokens, 0, job->fp8_until, names);
  job->prompt =
      cache.make_prompt(job->fp8_until > 0 ? names : tokens, request.cache_salt, job->block_variant);
  job->end_tokens = request.stop_tokens;
  if (!request.ignore_end) {
    job->end_tokens.insert(job->end_tokens.end(), runtime.end_tokens().begin(), runtime.end_tokens().end());
  }
  job->request = request;
  job->request.tokens = {};
  job->request.text = {};
  job->request.messages = {};
  job->request.images = {};
  if (request.embedding) job->request.max_tokens = 1;  // its buffers are made for the prompt alone
  job->events =
      std::make_shared<EventStream::State>(id, job->sampler->seed(), request.samples, choose(*job->prompt));
  return job;
}

}  // namespace millrace
