// millrace calibrate: what each weight's columns are multiplied with on a text, as llama.cpp's importance
// matrix; `millrace quantize --imatrix` and other programs weigh their errors by it.
#include "calibrate.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "backend/input_watcher.h"
#include "base/error.h"
#include "engine/input_sums.h"
#include "engine/out_tensors.h"
#include "engine/runtime.h"
#include "input.h"
#include "io/imatrix.h"
#include "model_options.h"
#include "open_model.h"
#include "output.h"
#include "progress.h"
#include "sample/token_softmax.h"

namespace millrace::cli {
namespace {

constexpr int32_t kRowsPerStep = 128;  // a vocabulary of floats each

struct CalibrateOptions {
  EngineOptions engine = default_options();
  std::string file, out;
  int32_t chunk = 512, max_chunks = 0;
};

constexpr const char* kCalibrateFooter =
    "Examples:\n"
    "  millrace calibrate model.gguf -f text.txt -o imatrix.gguf\n"
    "  millrace quantize model.gguf small.gguf --type iq4_xs --imatrix imatrix.gguf\n"
    "The text is read in chunks of its own, each from an empty context. A text like those that the model is "
    "used for\n"
    "is best; some ten thousand tokens are enough, of models with experts more. The file has llama.cpp's "
    "form.";

// Reads one chunk; the sum of -log p of all tokens but the first.
double read_chunk(Runtime& runtime, std::span<const int32_t> tokens) {
  kv::Sequence sequence = runtime.make_sequence();
  const size_t vocab = static_cast<size_t>(runtime.config().vocab);
  double nll = 0;
  for (size_t begin = 0; begin < tokens.size(); begin += kRowsPerStep) {
    const size_t count = std::min<size_t>(kRowsPerStep, tokens.size() - begin);
    const StepInput input{&sequence, tokens.subspan(begin, count), StepInput::Want::kAll};
    const std::span<const float> rows = runtime.step({&input, 1});
    for (size_t i = 0; i < count && begin + i + 1 < tokens.size(); ++i) {
      nll -= log_softmax_at(rows.subspan(i * vocab, vocab), tokens[begin + i + 1]);
    }
  }
  return nll;
}

// Of a Hugging Face directory whose columns quantize puts in another order: in that one, as other programs
// have them too.
void order_as_written(const io::Checkpoint& checkpoint, const ModelConfig& config,
                      io::ImportanceMatrix& matrix) {
  for (const auto& [name, tiles] : moved_columns(checkpoint, config)) {
    const auto found = matrix.entries.find(name);
    if (found == matrix.entries.end()) continue;
    const std::vector<float> sums = found->second.sums;
    for (size_t i = 0; i < sums.size(); ++i)
      found->second.sums[i] = sums[static_cast<size_t>(tiles.source(static_cast<int64_t>(i)))];
  }
}

int calibrate(const CalibrateOptions& options) {
  const std::string text = read_input(options.file);
  EngineOptions engine = options.engine;
  if (engine.device == "auto") engine.device = "cpu";  // a GPU shows no inputs
  engine.context = options.chunk;
  engine.kv_type = "f32";
  engine.step_tokens = kRowsPerStep;
  const auto runtime = open_runtime(engine, {.logit_rows = kRowsPerStep});
  runtime->check_generates();
  auto* const watched = dynamic_cast<WatchableExecutor*>(&runtime->executor());
  if (watched == nullptr) {
    throw_error(ErrorCode::kUnsupported,
                "--device: found {}, expected cpu or reference: others show no inputs",
                runtime->backend().name());
  }
  const std::vector<int32_t> tokens = runtime->tokenizer().encode(text, {.add_special = true});
  const auto chunk = static_cast<size_t>(options.chunk);
  size_t chunks = tokens.size() / chunk;
  if (options.max_chunks > 0) chunks = std::min(chunks, static_cast<size_t>(options.max_chunks));
  if (chunks == 0) {
    throw_error(ErrorCode::kBadInput, "{}: found {} tokens, expected at least one chunk of {} (--chunk)",
                options.file, tokens.size(), chunk);
  }
  InputSums sums(runtime->model());
  watched->watch_inputs(&sums);
  Progress progress("tokens", false);
  double nll = 0;
  for (size_t i = 0; i < chunks; ++i) {
    nll += read_chunk(*runtime, std::span(tokens).subspan(i * chunk, chunk));
    progress.update((i + 1) * chunk, chunks * chunk);
  }
  progress.clear();
  io::ImportanceMatrix matrix;
  matrix.entries = sums.entries();
  order_as_written(runtime->checkpoint(), runtime->config(), matrix);
  matrix.datasets = {std::filesystem::path(options.file).filename().string()};
  matrix.chunks = static_cast<int64_t>(chunks);
  matrix.chunk_tokens = options.chunk;
  io::write_imatrix(options.out, matrix);
  size_t unseen = 0;
  for (const auto& [name, entry] : matrix.entries) {
    unseen += static_cast<size_t>(std::count(entry.counts.begin(), entry.counts.end(), 0.0f));
  }
  write_stdout(fmt::format("{}: {} weights on {} tokens in {} chunks, perplexity {:.4f}{}\n", options.out,
                           matrix.entries.size(), chunks * chunk, chunks,
                           std::exp(nll / static_cast<double>(chunks * (chunk - 1))),
                           unseen == 0 ? "" : fmt::format("; {} matrices of experts saw no token", unseen)));
  return 0;
}

}  // namespace

void add_calibrate(CommandLine& line) {
  Command command = line.add("calibrate", "write an importance matrix for quantize --imatrix");
  auto options = std::make_shared<CalibrateOptions>();
  add_model_path(command, options->engine);
  command.option("-f,--file", options->file, "the text; -: standard input").required();
  command.option("-o,--out", options->out, "the file to write; appears whole or not at all").required();
  command.option("--chunk", options->chunk, "tokens of a chunk").range(8, 1 << 20).show_default();
  command.option("--chunks", options->max_chunks, "read so many at most; 0: the whole text")
      .range(0, 1 << 24)
      .show_default();
  command.option("--device", options->engine.device, "cpu or reference (slow, exact)").show_default();
  command.option("--threads", options->engine.threads, "CPU threads; 0: all that this process may use")
      .range(0, 1024)
      .show_default();
  command.footer(kCalibrateFooter);
  command.runs([options] { return calibrate(*options); });
}

}  // namespace millrace::cli
