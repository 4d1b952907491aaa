// millrace tokenize: text to token ids and back. Bytes are taken as they are, whatever the encoding.
#include "tokenize.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "confirm.h"
#include "engine/load_tokenizer.h"
#include "input.h"
#include "model_names.h"
#include "model_options.h"
#include "output.h"
#include "prompt.h"

namespace millrace::cli {
namespace {

struct TokenizeOptions {
  std::string model, file;
  std::vector<std::string> words;
  bool decode = false, no_special = false, json = false, count = false;
};

constexpr const char* kTokenizeFooter =
    "Examples:\n"
    "  millrace tokenize model.gguf \"Hello, world\"          # 1 9906 11 1917\n"
    "  millrace tokenize model.gguf -f book.txt --count\n"
    "  millrace tokenize model.gguf --decode 9906 11 1917   # also 9906,11,1917 and -f FILE\n"
    "  millrace tokenize model.gguf \"Hello\" --json | jq .tokens\n"
    "Text that begins with a dash goes after --.";

std::string input_text(const TokenizeOptions& options) {
  if (!options.file.empty()) return read_input(options.file);
  std::string text;
  for (const std::string& word : options.words) text += (text.empty() ? "" : " ") + word;
  return text;
}

int decode(const TokenizeOptions& options, const Tokenizer& tokenizer) {
  const std::vector<int32_t> ids =
      parse_tokens(options.file.empty() ? input_text(options) : "@" + options.file);
  const std::string text = tokenizer.decode(ids, !options.no_special);
  if (options.count) {
    write_stdout(fmt::format("{}\n", text.size()));
  } else if (options.json) {
    write_json({{"count", ids.size()}, {"ids", ids}, {"text", text}});
  } else {
    write_stdout(text + "\n");
  }
  return 0;
}

int encode(const TokenizeOptions& options, const Tokenizer& tokenizer) {
  const bool special = !options.no_special;
  const std::vector<int32_t> ids =
      tokenizer.encode(input_text(options), {.add_special = special, .parse_special = special});
  if (options.count) {
    write_stdout(fmt::format("{}\n", ids.size()));
  } else if (options.json) {
    std::vector<std::string> pieces;
    for (const int32_t id : ids) pieces.push_back(valid_utf8(tokenizer.token_bytes(id, true)));
    write_json({{"count", ids.size()}, {"ids", ids}, {"tokens", pieces}});
  } else {
    write_stdout(fmt::format("{}\n", fmt::join(ids, " ")));
  }
  return 0;
}

}  // namespace

void add_tokenize(CommandLine& line) {
  Command command = line.add("tokenize", "text to token ids, or back with --decode");
  auto options = std::make_shared<TokenizeOptions>();
  command.option("MODEL", options->model, kModelHelp).required();
  add_yes_option(command, "fetch the model without asking if it is not here");
  Option words = command.option("TEXT", options->words, "the text; with --decode the ids");
  Option file = command.option("-f,--file", options->file, "read from a file; -: standard input");
  words.excludes(file);
  command.flag("--decode", options->decode, "from ids to text");
  command.flag("--no-special", options->no_special,
               "encode: add no bos/eos, and take \"<|...|>\" as letters; decode: leave special tokens out");
  command.flag("--count", options->count, "only the number of tokens (of bytes with --decode)");
  command.flag("--json", options->json, "an object with count, ids and tokens (or text)");
  command.footer(kTokenizeFooter);
  command.refuse_unless(
      "--json", [options] { return !options->count; }, "with --count, which prints a number");
  command.check([words, file] {
    if (!words.given() && !file.given()) throw UsageError("nothing to do: give TEXT or -f FILE");
  });
  command.runs([options] {
    const io::Checkpoint checkpoint = io::Checkpoint::open(find_model(options->model, default_options()));
    const std::shared_ptr<const Tokenizer> tokenizer = load_tokenizer(checkpoint);
    return options->decode ? decode(*options, *tokenizer) : encode(*options, *tokenizer);
  });
}

}  // namespace millrace::cli
