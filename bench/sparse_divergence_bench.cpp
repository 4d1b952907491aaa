// sparse_divergence_bench: what sparse attention changes of a model's predictions. One window of a text is
// read by full attention and by every budget side by side, cache in f32; prints as JSON, per budget, the
// divergence KL(full || sparse) in nats per token. The same numbers as `millrace perplexity --attention
// sparse --kl`, which reads the text twice for each.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"
#include "engine/divergence.h"
#include "engine/runtime.h"

namespace millrace {
namespace {

struct Options {
  std::string model, text;
  int32_t window = 2048;
  std::vector<int32_t> budgets{256, 512, 1024};
  int threads = 0;
};

constexpr int32_t kRows = 64;  // a step's, each with a vocabulary of logits

std::unique_ptr<Runtime> open(const Options& o, int32_t budget) {
  EngineOptions options{
      .model = o.model, .threads = o.threads, .context = o.window, .kv_type = "f32", .step_tokens = kRows};
  if (budget > 0) {
    options.attention = "sparse";
    options.attention_budget = budget;
  }
  return Runtime::open(options, {.sequences = 1, .logit_rows = kRows});
}

int run(const Options& o) {
  const auto full = open(o, 0);
  std::ifstream in(o.text);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  std::vector<int32_t> tokens = full->tokenizer().encode(text);
  if (std::ssize(tokens) < o.window) {
    throw_error(ErrorCode::kBadInput, "{}: {} tokens, expected at least {}", o.text, tokens.size(), o.window);
  }
  tokens.resize(static_cast<size_t>(o.window));
  const auto vocab = static_cast<size_t>(full->config().vocab);
  struct Reader {
    int32_t budget;
    std::unique_ptr<Runtime> runtime;
    kv::Sequence sequence;
    DivergenceMeter meter;
  };
  std::vector<Reader> readers(o.budgets.size());
  for (size_t i = 0; i < readers.size(); ++i) {
    readers[i].budget = o.budgets[i];
    readers[i].runtime = open(o, o.budgets[i]);
    readers[i].sequence = readers[i].runtime->make_sequence();
  }
  kv::Sequence sequence = full->make_sequence();
  const size_t last = tokens.size() - 1;  // which predicts nothing we know
  for (size_t at = 0; at < last; at += kRows) {
    const size_t count = std::min<size_t>(kRows, last - at);
    const StepInput input{&sequence, std::span(tokens).subspan(at, count), StepInput::Want::kAll};
    const std::span<const float> want = full->step({&input, 1});
    for (Reader& reader : readers) {
      const StepInput same{&reader.sequence, input.tokens, input.want};
      reader.meter.add(reader.runtime->backend(), want, reader.runtime->step({&same, 1}),
                       static_cast<int64_t>(vocab), std::span(tokens).subspan(at + 1, count));
    }
  }
  nlohmann::ordered_json out = {{"window", o.window}, {"isa", full->backend().isa()}, {"divergence", {}}};
  for (Reader& reader : readers) {
    const Divergence d = reader.meter.result();
    out["divergence"].push_back({{"budget", reader.budget},
                                 {"mean", d.mean},
                                 {"p99", d.p99},
                                 {"top1", d.top1_agreement},
                                 {"perplexity_ratio", d.perplexity_ratio},
                                 {"tokens", d.tokens}});
    reader.sequence.reset();
  }
  std::printf("%s\n", out.dump(1).c_str());
  return 0;
}

}  // namespace
}  // namespace millrace

int main(int argc, char** argv) {
  millrace::Options options;
  CLI::App app("what sparse attention changes of a model's predictions");
  app.add_option("MODEL", options.model)->required();
  app.add_option("TEXT", options.text, "a file")->required();
  app.add_option("--window", options.window)->check(CLI::Range(64, 1 << 22));
  app.add_option("--budgets", options.budgets)->delimiter(',');
  app.add_option("--threads", options.threads);
  CLI11_PARSE(app, argc, argv);
  try {
    return millrace::run(options);
  } catch (const millrace::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
