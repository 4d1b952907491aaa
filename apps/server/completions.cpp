// POST /v1/completions: text or tokens in, text out, for one prompt or many.
#include <algorithm>

#include "api_error.h"
#include "base/error.h"
#include "choices_answer.h"
#include "endpoints.h"
#include "ids.h"
#include "infill_prompt.h"
#include "logprobs.h"
#include "prompt_bounds.h"
#include "prompts.h"
#include "request_fields.h"

namespace millrace::server {
namespace {

constexpr size_t kMaxPrompts = 256;

class CompletionAnswer final : public ChoicesAnswer {
 public:
  // only_prompt: the one token that each request asks for is not given.
  CompletionAnswer(Api& api, ModelLease lease, const std::vector<Request>& requests,
                   std::vector<std::string> echoes, bool only_prompt, StreamOptions stream, Headers headers,
                   Timeline::Entry entry)
      : ChoicesAnswer(api, std::move(lease), requests, stream, std::move(headers), std::move(entry),
                      "text_completion"),
        engine_(model().engine()),
        only_prompt_(only_prompt),
        choices_(generation_.choices()) {
    const size_t samples = choices_.size() / requests.size();
    for (size_t i = 0; i < choices_.size() && !echoes.empty(); ++i) choices_[i].append(echoes[i / samples]);
  }

 private:
  struct Choice {
    std::string text;       // given, or collected
    std::string fresh;      // not yet given
    size_t characters = 0;  // of both
    std::string finish;
    LogprobColumns logprobs;

    void append(std::string_view more) {
      fresh += more;
      characters += count_characters(more);
    }
  };

  void take(const Generation::Item& item, std::string& out) override {
    Choice& choice = choices_[item.choice];
    const Event& event = item.event;
    if (event.prompt) choice.logprobs.add_prompt(engine_, *event.prompt, choice.fresh);
    if (event.kind != Event::Kind::kToken)
      choice.finish = only_prompt_ ? "length" : finish_name(event.finish);
    if (!only_prompt_) {
      if (event.kind == Event::Kind::kToken && logprobs_) {
        choice.logprobs.add(engine_, event, choice.characters);
      }
      choice.append(event.text);
    }
    if (event.kind == Event::Kind::kFailed || !stream_.stream) return;
    if (choice.fresh.empty() && choice.finish.empty() && choice.logprobs.empty()) return;
    send(out, [&](JsonWriter& json) { write_choice(json, item.choice, choice.fresh); });
    choice.text += choice.fresh;
    choice.fresh.clear();
  }

  void write_choice(JsonWriter& json, size_t index) override {
    write_choice(json, index, choices_[index].text + choices_[index].fresh);
  }
  void write_choice(JsonWriter& json, size_t index, std::string_view text) {
    Choice& choice = choices_[index];
    json.begin_object().field("index", index).field("text", text).key("logprobs");
    if (logprobs_ && !choice.logprobs.empty()) {
      choice.logprobs.write(json);
    } else {
      json.value(nullptr);
    }
    json.text_or_null("finish_reason", choice.finish).end_object();
  }

  int64_t given_tokens() const override { return only_prompt_ ? 0 : generation_.totals().generated; }

  const Engine& engine_;
  const bool only_prompt_;
  std::vector<Choice> choices_;
};

// The text behind what is to be written, for a model that was trained to write between two texts.
std::optional<std::string> read_suffix(const Fields& fields, const ServedModel& model) {
  std::optional<std::string> suffix = fields.text("suffix");
  if (!suffix || suffix->empty()) return std::nullopt;
  if (!model.info().infill.fills()) {
    bad_field("suffix", "is not supported by this model: its vocabulary has no tokens for it",
              "unsupported_parameter");
  }
  check_text_may_fit(model.engine(), *suffix, "suffix");
  return suffix;
}

std::vector<int32_t> tokens_around_gap(const Prompt& prompt, const std::string& suffix,
                                       const Engine& engine) {
  if (!prompt.tokens.empty()) bad_field(prompt.path, "found token ids, expected a string beside suffix");
  std::vector<int32_t> tokens = infill_prompt(engine, {.prefix = prompt.text, .suffix = suffix});
  check_context(tokens.size(), engine.model(), prompt.path);
  return tokens;
}

}  // namespace

Reply completions(Api& api, const HttpRequest& request, const Client& client) {
  const Json body = parse_object(request.body);
  const Fields fields(body);
  const ModelLease model = api.writer_of(fields);
  const StreamOptions stream = read_stream_options(fields);
  Request base = read_request(fields, api, *model, client);
  // OpenAI's own default; without it an answer would fill the context. None at all is asked for by those who
  // want the logprobs of a prompt; the engine's 0 is no limit.
  const int64_t max_tokens = fields.integer("max_tokens", 0, 1 << 28).value_or(16);
  base.max_tokens = static_cast<int32_t>(std::max<int64_t>(1, max_tokens));
  if (const auto logprobs = fields.integer("logprobs", 0, 20)) {
    base.sampling.logprobs = static_cast<int32_t>(*logprobs);
  }
  const std::optional<std::string> suffix = read_suffix(fields, *model);
  if (suffix && !base.ignore_end) base.stop_tokens = model->info().infill.ends;
  const auto best_of = read_samples(fields, "best_of", model->info());
  if (best_of && *best_of != base.samples) {
    bad_field("best_of", "is supported only when it equals n", "unsupported_value");
  }
  base.constraint = model->constraints().for_text(model->constraints().of_request(fields));
  const bool echo = fields.boolean("echo").value_or(false);
  if (echo && suffix) bad_field("echo", "is not supported beside suffix", "unsupported_value");
  if (echo) base.prompt_logprobs = base.sampling.logprobs;

  std::vector<Request> requests;
  std::vector<std::string> echoes;
  for (Prompt& prompt : read_prompts(fields, "prompt", model->info().vocab, kMaxPrompts)) {
    Request r = base;
    if (suffix || echo) check_text_may_fit(model->engine(), prompt.text, prompt.path);
    if (echo)
      echoes.push_back(prompt.tokens.empty() ? prompt.text : model->engine().detokenize(prompt.tokens, true));
    if (suffix) {
      r.tokens = tokens_around_gap(prompt, *suffix, model->engine());
    } else {
      r.tokens = prompt_tokens(prompt, model->engine());
    }
    requests.push_back(std::move(r));
  }
  Timeline::Entry entry = entry_of(new_id("cmpl-", 24), "completions", client, stream.stream);
  Headers headers = warn_ignored(fields, {"user"}, api, client);
  Reply reply;
  reply.answer = std::make_unique<CompletionAnswer>(api, model, requests, std::move(echoes), max_tokens == 0,
                                                    stream, std::move(headers), std::move(entry));
  return reply;
}

}  // namespace millrace::server
