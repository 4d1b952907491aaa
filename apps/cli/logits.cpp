// millrace logits: the numbers themselves, so that anyone can check them against anything.
#include "logits.h"

#include <fmt/core.h>

#include <algorithm>
#include <memory>

#include "base/error.h"
#include "input.h"
#include "io/npy_writer.h"
#include "model_options.h"
#include "open_model.h"
#include "output.h"
#include "progress.h"

namespace millrace::cli {
namespace {

struct LogitsOptions {
  EngineOptions engine = default_options();
  std::string tokens, out;
  bool all = false;
};

constexpr const char* kLogitsFooter =
    "Examples:\n"
    "  millrace logits model.gguf --tokens 1,15043,3186 --out last.npy          # float32 [1, vocabulary]\n"
    "  millrace logits model.gguf --tokens @ids.txt --all --out all.npy         # float32 [tokens, "
    "vocabulary]\n"
    "  millrace logits model.gguf --tokens 1,2,3 --device reference --out r.npy # the exact ones\n"
    "Row i holds the logits of the token that follows tokens[0..i]. Read it with numpy.load.";

// Rows per step with --all: each is a whole vocabulary of floats.
constexpr int32_t kLogitsRows = 64;

int logits(const LogitsOptions& options) {
  const std::vector<int32_t> tokens = parse_tokens(options.tokens);
  const int32_t count = static_cast<int32_t>(tokens.size());
  EngineOptions engine = options.engine;
  if (engine.context == 0) engine.context = count;
  if (options.all) engine.step_tokens = kLogitsRows;
  const std::unique_ptr<Runtime> runtime =
      open_runtime(engine, {.logit_rows = options.all ? kLogitsRows : 1});
  io::NpyWriter writer(options.out, options.all ? count : 1, runtime->config().vocab);
  kv::Sequence sequence = runtime->make_sequence();
  Progress progress("tokens", false);
  const std::span<const int32_t> all = tokens;
  for (size_t done = 0; done < all.size();) {
    const size_t n = std::min(static_cast<size_t>(runtime->spec().max_tokens), all.size() - done);
    const bool last = done + n == all.size();
    using Want = StepInput::Want;
    const StepInput input{&sequence, all.subspan(done, n),
                          options.all ? Want::kAll
                          : last      ? Want::kLast
                                      : Want::kNone,
                          /*prompt=*/true};
    const std::span<const float> rows = runtime->step({&input, 1});
    if (options.all) {
      writer.write_rows(rows.data(), static_cast<int64_t>(n));
    } else if (last) {
      writer.write_rows(rows.data(), 1);
    }
    done += n;
    progress.update(done, all.size());
  }
  writer.commit();
  return 0;
}

}  // namespace

void add_logits(CommandLine& line) {
  Command command = line.add("logits", "write a model's logits for given tokens to a .npy file");
  auto options = std::make_shared<LogitsOptions>();
  add_model_path(command, options->engine);
  command.option("--tokens", options->tokens, "ids: 1,2,3 or @FILE (@-: standard input)").required();
  command.flag("--all", options->all, "a row for every token, not only the last");
  command.option("--out", options->out, "the .npy file to write; appears whole or not at all").required();
  add_loading_options(command, options->engine);
  command.footer(kLogitsFooter);
  command.runs([options] { return logits(*options); });
}

}  // namespace millrace::cli
