// millrace perplexity: how well a model predicts a text. The text's tokens are cut into windows of --ctx
// tokens that begin every --stride tokens. Each window is read from an empty cache; a token is scored by the
// probability the model gave it after the tokens before it in the window; every token is scored once, in the
// first window that holds it, and the first token of the first window of the text (with stride = ctx: of each
// window) has nothing before it and is not scored. With --kl a baseline reads the same windows in step, and
// what both predict after each scored token's predecessors is compared.
#include "perplexity.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "engine/divergence.h"
#include "engine/load_tokenizer.h"
#include "input.h"
#include "kernels/quant/kv_types.h"
#include "model_names.h"
#include "model_options.h"
#include "open_model.h"
#include "output.h"
#include "progress.h"
#include "prompt.h"
#include "sample/token_softmax.h"

namespace millrace::cli {
namespace {

struct PerplexityOptions {
  EngineOptions engine = default_options();
  std::string file, tokens;
  int32_t stride = 0;
  bool json = false;
  bool compare = false;                   // --kl
  std::string baseline, baseline_device;  // of --kl; empty: the same as the model's
};

constexpr const char* kPerplexityFooter =
    "Examples:\n"
    "  millrace perplexity model.gguf -f book.txt --ctx 2048\n"
    "  millrace perplexity model.gguf --tokens @ids.txt --ctx 512 --stride 256 --json\n"
    "The tokens (bos included, if the model's tokenizer adds one) are cut into windows of --ctx that begin "
    "every\n"
    "--stride tokens, each read from an empty cache. A token is scored once, in the first window that holds "
    "it,\n"
    "given the tokens before it in that window; the first token of a window is not scored. The result is\n"
    "exp(mean of -log p). The default stride, --ctx, gives windows that do not overlap; the default --ctx is "
    "what\n"
    "the model was trained for, at most 4096.\n"
    "  millrace perplexity small.gguf -f book.txt --kl original.gguf      # what quantizing changed\n"
    "  millrace perplexity model.gguf -f book.txt --kv-type f16 --kl      # what this cache changes\n"
    "--kl compares with a baseline (default: the same file), which keeps its cache in f32 and its weights as "
    "stored:\n"
    "the divergence KL(baseline || model) in nats per scored token, its mean and the value 99% of tokens do "
    "not "
    "pass,\n"
    "and the share of tokens for which both find the same successor likeliest. --kl-device reference "
    "compares "
    "with\n"
    "the oracle's arithmetic.";

// Each scored row is a whole vocabulary of floats: this many at a time.
constexpr int32_t kPerplexityRows = 64;

// Without --ctx windows are no longer than this, whatever memory holds: figures stay comparable.
constexpr int32_t kPerplexityWindow = 4096;

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

// The model, and with --kl the baseline that reads along.
struct Readers {
  std::unique_ptr<Runtime> model, baseline;
  Score score;
  DivergenceMeter meter;
};

// Scores window tokens [first_scored, end) from rows of the tokens before them.
void score_window(Readers& readers, std::span<const int32_t> window, size_t first_scored,
                  const std::function<void(size_t)>& fed) {
  Runtime& runtime = *readers.model;
  kv::Sequence sequence = runtime.make_sequence();
  std::optional<kv::Sequence> other;
  if (readers.baseline) other = readers.baseline->make_sequence();
  const size_t vocab = static_cast<size_t>(runtime.config().vocab);
  const size_t last = window.size() - 1;  // the last token predicts nothing we know
  for (size_t begin = 0; begin < last;) {
    const size_t n = std::min(static_cast<size_t>(runtime.spec().max_tokens), last - begin);
    const bool wanted = begin + n >= first_scored;
    const StepInput input{&sequence, window.subspan(begin, n),
                          wanted ? StepInput::Want::kAll : StepInput::Want::kNone, true};
    const std::span<const float> rows = runtime.step({&input, 1});
    const size_t skip = wanted && first_scored > begin + 1 ? first_scored - begin - 1 : 0;
    for (size_t i = skip; wanted && i < n; ++i) {
      readers.score.add(-log_softmax_at(rows.subspan(i * vocab, vocab), window[begin + i + 1]));
    }
    if (other) {
      const StepInput same{&*other, input.tokens, input.want, true};
      const std::span<const float> expected = readers.baseline->step({&same, 1});
      if (wanted) {
        readers.meter.add(runtime.backend(), expected.subspan(skip * vocab), rows.subspan(skip * vocab),
                          static_cast<int64_t>(vocab), window.subspan(begin + skip + 1, n - skip));
      }
    }
    begin += n;
    fed(n);
  }
}

std::vector<int32_t> input_tokens(const PerplexityOptions& options) {
  if (!options.tokens.empty()) return parse_tokens(options.tokens);
  const std::string text = read_input(options.file);
  return load_tokenizer(io::Checkpoint::open(find_model(options.engine.model, options.engine)))->encode(text);
}

const std::string& baseline_path(const PerplexityOptions& options) {
  return options.baseline.empty() ? options.engine.model : options.baseline;
}

Readers open_readers(const PerplexityOptions& options) {
  const RuntimeSetup setup{.logit_rows = kPerplexityRows, .most_context = kPerplexityWindow};
  EngineOptions engine = options.engine;
  engine.step_tokens = kPerplexityRows;
  Readers readers;
  readers.model = open_runtime(engine, setup);
  if (!options.compare) return readers;
  const EngineOptions baseline{
      .model = baseline_path(options),
      .device = options.baseline_device.empty() ? engine.device : options.baseline_device,
      .threads = engine.threads,
      .context = readers.model->context(),
      .kv_type = "f32",
      .step_tokens = kPerplexityRows};
  readers.baseline = open_runtime(baseline, setup);
  if (readers.baseline->config().vocab != readers.model->config().vocab) {
    throw_error(ErrorCode::kBadInput, "--kl {}: found a vocabulary of {}, expected {} as in {}",
                baseline.model, readers.baseline->config().vocab, readers.model->config().vocab,
                options.engine.model);
  }
  return readers;
}

nlohmann::ordered_json to_json(const Divergence& d, const PerplexityOptions& options) {
  return {{"baseline", valid_utf8(baseline_path(options))},
          {"mean", d.mean},
          {"p99", d.p99},
          {"max", d.max},
          {"top1_agreement", d.top1_agreement},
          {"perplexity_ratio", d.perplexity_ratio},
          {"tokens", d.tokens}};
}

std::string to_text(const Divergence& d, const PerplexityOptions& options) {
  return fmt::format(
      "against    {}\n  KL mean  {:.6f} nats, 99% of tokens at most {:.6f}, largest {:.6f}\n"
      "  top-1    the same for {:.3f}% of {} tokens\n  perplexity {:+.3f}%\n",
      baseline_path(options), d.mean, d.p99, d.max, 100.0 * d.top1_agreement, d.tokens,
      100.0 * (d.perplexity_ratio - 1.0));
}

int perplexity(const PerplexityOptions& options) {
  const std::vector<int32_t> tokens = input_tokens(options);
  if (tokens.size() < 2) {
    throw_error(ErrorCode::kBadInput, "{}: {} tokens, expected at least 2: the first is not scored",
                options.file.empty() ? "--tokens" : options.file, tokens.size());
  }
  Readers readers = open_readers(options);
  Runtime* const runtime = readers.model.get();
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
  Progress progress("tokens", false);
  const size_t starts = (tokens.size() - 1 + stride - 1) / stride;
  size_t fed = 0, total = 0, windows = 0, scored_end = 0;
  for (size_t i = 0; i < starts; ++i) total += std::min(window, tokens.size() - i * stride) - 1;
  for (size_t begin = 0; scored_end < tokens.size() && begin + 1 < tokens.size();
       begin += stride, ++windows) {
    const size_t end = std::min(begin + window, tokens.size());
    const size_t first_scored = std::max(scored_end, begin + 1) - begin;
    score_window(readers, std::span(tokens).subspan(begin, end - begin), first_scored, [&](size_t n) {
      fed += n;
      progress.update(fed, std::max(fed, total));
    });
    scored_end = end;
  }
  progress.clear();
  const Score& score = readers.score;
  if (options.json) {
    nlohmann::ordered_json out = {{"perplexity", std::exp(score.mean())},
                                  {"nll", score.mean()},
                                  {"nll_standard_error", score.error()},
                                  {"tokens", tokens.size()},
                                  {"scored_tokens", score.tokens},
                                  {"windows", windows},
                                  {"ctx", window},
                                  {"stride", stride},
                                  {"device", runtime->backend().name()},
                                  {"isa", runtime->backend().isa()},
                                  {"kv_type", kv_type_name(runtime->spec().kv_type)}};
    if (readers.baseline) out["kl"] = to_json(readers.meter.result(), options);
    write_json(out);
  } else {
    write_stdout(fmt::format(
        "perplexity {:.4f}\nmean nll   {:.6f} +- {:.6f}\ntokens     {} ({} scored, {} windows of {})\n",
        std::exp(score.mean()), score.mean(), score.error(), tokens.size(), score.tokens, windows, window));
    if (readers.baseline) write_stdout(to_text(readers.meter.result(), options));
  }
  return 0;
}

}  // namespace

void add_perplexity(CommandLine& line) {
  Command command = line.add("perplexity", "how well the model predicts a text");
  auto options = std::make_shared<PerplexityOptions>();
  add_model_path(command, options->engine);
  Option file = command.option("-f,--file", options->file, "the text; -: standard input");
  Option tokens = command.option("--tokens", options->tokens, "ids instead: 1,2,3 or @FILE");
  file.excludes(tokens);
  command.option("--stride", options->stride, "tokens between the beginnings of windows; 0: --ctx")
      .range(0, 1 << 28)
      .show_default();
  Option kl = command.option("--kl", options->baseline,
                             "also the divergence from this model; no value: from the same file, f32 cache");
  kl.value_may_be_left_out();
  command.option("--kl-device", options->baseline_device, "of the baseline; default: as --device").needs(kl);
  command.flag("--json", options->json, "one JSON object");
  add_device_options(command, options->engine);
  add_quantize_option(command, options->engine);
  add_adapter_option(command, options->engine);
  command.footer(kPerplexityFooter);
  command.check([options, file, tokens, kl] {
    options->compare = kl.given();
    if (!file.given() && !tokens.given()) throw UsageError("no text: give -f FILE or --tokens IDS");
  });
  command.runs([options] { return perplexity(*options); });
}

}  // namespace millrace::cli
