// millrace run: one prompt, one answer, streamed as it is generated.
#include "run.h"

#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "answer.h"
#include "base/error.h"
#include "channel_filter.h"
#include "input.h"
#include "interrupt.h"
#include "model_options.h"
#include "open_model.h"
#include "output.h"
#include "prompt.h"
#include "sampling_options.h"

namespace millrace::cli {
namespace {

struct RunOptions {
  EngineOptions engine = default_options();
  SamplingOptions sampling;
  std::string prompt, file, system;
  int32_t max_tokens = 0;
  std::vector<std::string> stop;
  bool raw = false, json = false, special = false, ignore_end = false, quiet = false;
};

constexpr const char* kRunFooter =
    "Examples:\n"
    "  millrace run model.gguf -p \"Why is the sky blue?\"\n"
    "  millrace run model.gguf -f question.txt -n 200 --temp 0      # repeatable: no chance involved\n"
    "  git diff | millrace run model.gguf --system \"Summarize this change.\" -f -\n"
    "  millrace run model.gguf --raw -p \"Once upon a time\" --seed 7  # continue the text, no chat "
    "template\n"
    "  millrace run model.gguf -p Hi --json --logprobs 5 | jq .tokens[0]\n"
    "  millrace run model.gguf -f code.py --speculate lookup        # the same text, faster where it repeats "
    "itself\n"
    "The answer goes to standard output, everything else to standard error. Ctrl-C stops the answer (status "
    "130).";

std::vector<int32_t> encode_prompt(const Engine& engine, const RunOptions& options) {
  const std::string text = options.file.empty() ? options.prompt : read_input(options.file);
  const ModelInfo& model = engine.model();
  check_writes(model);
  // A template that cannot be read is an error, not a reason to do without.
  if (options.raw || (!model.has_chat_template && model.chat_template_error.empty())) {
    if (!options.system.empty()) {
      throw_error(ErrorCode::kBadInput, "--system: needs a chat template, found {}",
                  options.raw ? "--raw" : options.engine.model + " without one");
    }
    return engine.tokenize(text);
  }
  Messages messages = Messages::array();
  if (!options.system.empty()) add_message(messages, "system", options.system);
  add_message(messages, "user", text);
  return encode_chat(engine, messages);
}

struct Answer {
  std::string text, thinking;
};

nlohmann::ordered_json token_json(const Engine& engine, int32_t id, std::optional<double> logprob) {
  nlohmann::ordered_json out = {{"id", id}, {"text", valid_utf8(engine.token_text(id))}};
  if (logprob) out["logprob"] = *logprob;
  return out;
}

void print_json(const Engine& engine, const AnswerResult& result, const Answer& answer, bool logprobs) {
  nlohmann::ordered_json tokens = nlohmann::ordered_json::array();
  for (const Event& token : result.tokens) {
    nlohmann::ordered_json entry =
        token_json(engine, token.token, logprobs ? std::optional(token.logprob) : std::nullopt);
    if (!token.top.empty()) {
      entry["top"] = nlohmann::ordered_json::array();
      for (const auto& [id, logprob] : token.top) entry["top"].push_back(token_json(engine, id, logprob));
    }
    tokens.push_back(std::move(entry));
  }
  write_json({{"text", answer.text},
              {"thinking", answer.thinking},
              {"finish_reason", to_string(result.finish)},
              {"seed", result.seed},
              {"prompt_tokens", result.usage.prompt_tokens},
              {"generated_tokens", result.tokens.size()},
              {"prefill_tok_s", result.prefill_tok_s()},
              {"decode_tok_s", result.decode_tok_s()},
              {"first_token_s", result.usage.first_token_s},
              {"drafted_tokens", result.usage.drafted_tokens},
              {"accepted_tokens", result.usage.accepted_tokens},
              {"tokens", std::move(tokens)}});
}

int run(const RunOptions& options) {
  sampling_params(options.sampling);  // a mistake is told before the model is loaded
  const std::string adapter = only_adapter(options.engine);
  const std::unique_ptr<Engine> engine = open_engine(options.engine);
  Request request;
  request.sampling = sampling_params(options.sampling, engine->model().sampling);
  request.tokens = encode_prompt(*engine, options);
  if (request.tokens.empty()) {
    throw_error(ErrorCode::kBadInput,
                "the prompt has no tokens, expected at least one (the model adds none itself)");
  }
  request.adapter = adapter;
  request.max_tokens = options.max_tokens;
  request.stop = options.stop;
  request.show_special = options.special;
  request.ignore_end = options.ignore_end;
  // Raw text and text with its special tokens are shown as they are.
  const bool filtered = !options.raw && !options.special;
  ChannelFilter filter(*engine);
  Answer answer;
  const AnswerResult result = stream_answer(*engine, request, [&](int32_t token, std::string_view text) {
    const std::string piece = filtered ? filter.push(token, text) : std::string(text);
    answer.text += piece;
    if (!options.json) write_stdout(piece);
  });
  answer.thinking = filter.thinking();
  if (options.json) {
    print_json(*engine, result, answer, options.sampling.params.logprobs.has_value());
  } else if (!answer.text.ends_with('\n')) {
    write_stdout("\n");
  }
  if (!options.quiet && !options.json) {
    write_stderr(fmt::format(
        "[prompt {} tokens, {:.1f} tok/s; generated {} tokens, {:.1f} tok/s; {}first token {:.2f} s; "
        "{}; seed {}]\n",
        result.usage.prompt_tokens, result.prefill_tok_s(), result.tokens.size(), result.decode_tok_s(),
        drafts_text(options.engine, result.usage), result.usage.first_token_s, to_string(result.finish),
        result.seed));
  }
  throw_if_interrupted();
  return 0;
}

}  // namespace

void add_run(CommandLine& line) {
  Command command = line.add("run", "answer one prompt");
  auto options = std::make_shared<RunOptions>();
  options->engine.max_running = 1;
  add_model_path(command, options->engine);
  Option prompt = command.option("-p,--prompt", options->prompt, "the prompt");
  Option file = command.option("-f,--file", options->file, "read the prompt from a file; -: standard input");
  prompt.excludes(file);
  command.option("-n,--max-tokens", options->max_tokens, "most tokens to generate; 0: until the model ends")
      .range(0, 1 << 28)
      .show_default();
  command.option("--system", options->system, "system message of the chat template");
  command.flag("--raw", options->raw, "no chat template: the model continues the text itself");
  command.option("--stop", options->stop, "stop before this text; may be repeated");
  command.flag("--special", options->special, "show special tokens in the text");
  command.flag("--ignore-end", options->ignore_end, "go on after the model's end token");
  command.flag("--json", options->json, "one JSON object at the end instead of streaming");
  command.option("--logprobs", options->sampling.params.logprobs,
                 "with --json: log-probabilities of each token and the N likeliest");
  command.flag("-q,--quiet", options->quiet, "no statistics at the end");
  add_sampling_options(command, options->sampling);
  add_loading_options(command, options->engine);
  add_draft_options(command, options->engine, "Guessing ahead");
  command.footer(kRunFooter);
  command.refuse_unless(
      "--logprobs", [options] { return options->json; }, "without --json, which has room for them");
  command.check([prompt, file] {
    if (!prompt.given() && !file.given()) throw UsageError("no prompt: give -p TEXT or -f FILE");
  });
  command.runs([options] { return run(*options); });
}

}  // namespace millrace::cli
