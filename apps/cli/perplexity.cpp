// millrace perplexity: how well a model predicts a text. The text's tokens are cut into windows of --ctx
// tokens that begin every --stride tokens. Each window is read from an empty cache; a token is scored by the
// probability the model gave it after the tokens before it in the window; every token is scored once, in the
// first window that holds it, and the first token of the first window of the text (with stride = ctx: of each
// window) has nothing before it and is not scored.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "commands.h"
#include "options.h"
#include "output.h"
#include "progress.h"
#include "sample/softmax.h"

namespace millrace::cli {
namespace {

struct PerplexityOptions {
  ModelOptions model;
  std::string file, tokens;
  int32_t stride = 0;
  bool json = false;
};

constexpr const char* kFooter =
    "Examples:\n"
    "  millrace perplexity model.gguf -f book.txt --ctx 2048\n"
    "  millrace perplexity model.gguf --tokens @ids.txt --ctx 512 --stride 256 --json\n"
    "The tokens (bos included, if the model's tokenizer adds one) are cut into windows of --ctx that begin "
    "every\n"
    "--stride tokens, each read from an empty cache. A token is scored once, in the first window that holds "
    "it,\n"
    "given the tokens before it in that window; the first token of a window is not scored. The result is\n"
    "exp(mean of -log p). The default stride, --ctx, gives windows that do not overlap.";

// Each scored row is a whole vocabulary of floats: this many at a time.
constexpr int32_t kRowsPerStep = 64;

struct Score {
  double nll = 0.0, squares = 0.0;
  int64_t tokens = 0;
  void add(double value) {
    nll += value;
    squares += value * value;
    ++tokens;
  }
  double mean() const { return nll / static_cast<double>(tokens); }
  // Standard error of the mean.
  double error() const {
    const double n = static_cast<double>(tokens);
    return tokens < 2 ? 0.0 : std::sqrt(std::max(0.0, squares / n - mean() * mean()) / (n - 1));
  }
};

// Scores window tokens [first_scored, end) from rows of the tokens before them.
void score_window(Runtime& runtime, std::span<const int32_t> window, size_t first_scored, Score& score,
                  const std::function<void(size_t)>& fed) {
  Sequence sequence = runtime.make_sequence();
  const size_t vocab = static_cast<size_t>(runtime.config().vocab);
  const size_t last = window.size() - 1;  // the last token predicts nothing we know
  for (size_t begin = 0; begin < last;) {
    const size_t n = std::min(static_cast<size_t>(runtime.spec().max_tokens), last - begin);
    const bool wanted = begin + n >= first_scored;
    const StepInput input{&sequence, window.subspan(begin, n),
                          wanted ? StepInput::Want::kAll : StepInput::Want::kNone};
    const std::span<const float> rows = runtime.step({&input, 1});
    for (size_t i = 0; wanted && i < n; ++i) {
      const size_t target = begin + i + 1;
      if (target >= first_scored) score.add(-log_softmax_at(rows.subspan(i * vocab, vocab), window[target]));
    }
    begin += n;
    fed(n);
  }
}

std::vector<int32_t> input_tokens(const PerplexityOptions& options) {
  if (!options.tokens.empty()) return parse_tokens(options.tokens);
  const std::string text = read_input(options.file);
  return load_tokenizer(io::Checkpoint::open(options.model.path))->encode(text);
}

int perplexity(const PerplexityOptions& options) {
  const std::vector<int32_t> tokens = input_tokens(options);
  if (tokens.size() < 2) {
    throw_error(ErrorCode::kBadInput, "{}: {} tokens, expected at least 2: the first is not scored",
                options.file.empty() ? "--tokens" : options.file, tokens.size());
  }
  const std::unique_ptr<Runtime> runtime = open_runtime(options.model, [](RuntimeOptions& runtime_options) {
    runtime_options.step_tokens = runtime_options.logit_rows = kRowsPerStep;
  });
  for (const int32_t token : tokens) {  // the last token of a window is scored without being fed
    if (token >= runtime->config().vocab) {
      throw_error(ErrorCode::kBadInput, "token id: found {}, expected 0 to {}", token,
                  runtime->config().vocab - 1);
    }
  }
  const size_t window = static_cast<size_t>(runtime->context());
  const size_t stride = options.stride == 0 ? window : static_cast<size_t>(options.stride);
  if (stride > window || window < 2) {
    throw_error(ErrorCode::kBadInput,
                "--stride is {} and the window --ctx is {}, expected a window of at least 2 and "
                "a stride of at most the window",
                stride, window);
  }
  Score score;
  Progress progress("tokens", false);
  const size_t starts = (tokens.size() - 1 + stride - 1) / stride;
  size_t fed = 0, total = 0, windows = 0, scored_end = 0;
  for (size_t i = 0; i < starts; ++i) total += std::min(window, tokens.size() - i * stride) - 1;
  for (size_t begin = 0; scored_end < tokens.size() && begin + 1 < tokens.size();
       begin += stride, ++windows) {
    const size_t end = std::min(begin + window, tokens.size());
    const size_t first_scored = std::max(scored_end, begin + 1) - begin;
    score_window(*runtime, std::span(tokens).subspan(begin, end - begin), first_scored, score, [&](size_t n) {
      fed += n;
      progress.update(fed, std::max(fed, total));
    });
    scored_end = end;
  }
  progress.clear();
  if (options.json) {
    write_json({{"perplexity", std::exp(score.mean())},
                {"nll", score.mean()},
                {"nll_standard_error", score.error()},
                {"tokens", tokens.size()},
                {"scored_tokens", score.tokens},
                {"windows", windows},
                {"ctx", window},
                {"stride", stride},
                {"device", runtime->backend().name()}});
  } else {
    write_stdout(fmt::format(
        "perplexity {:.4f}\nmean nll   {:.6f} +- {:.6f}\ntokens     {} ({} scored, {} windows of {})\n",
        std::exp(score.mean()), score.mean(), score.error(), tokens.size(), score.tokens, windows, window));
  }
  return 0;
}

}  // namespace

void add_perplexity(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("perplexity", "how well the model predicts a text");
  auto options = std::make_shared<PerplexityOptions>();
  add_model_path(*command, options->model);
  CLI::Option* file = command->add_option("-f,--file", options->file, "the text; -: standard input");
  CLI::Option* tokens = command->add_option("--tokens", options->tokens, "ids instead: 1,2,3 or @FILE");
  file->excludes(tokens);
  command->add_option("--stride", options->stride, "tokens between the beginnings of windows; 0: --ctx")
      ->check(CLI::Range(0, 1 << 28))
      ->capture_default_str();
  command->add_flag("--json", options->json, "one JSON object");
  add_device_options(*command, options->model);
  command->footer(kFooter);
  command->callback([options, &action, file, tokens] {
    if (file->count() + tokens->count() == 0)
      throw CLI::ValidationError("no text: give -f FILE or --tokens IDS");
    action = [options] { return perplexity(*options); };
  });
}

}  // namespace millrace::cli
