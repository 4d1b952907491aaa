#include "infill_prompt.h"

#include <algorithm>
#include <string_view>

#include "api_error.h"

namespace millrace::server {
namespace {

// Names that nobody gave: those of the repository and of the file with the gap.
constexpr std::string_view kRepository = "repository\n", kThisFile = "file\n";

class PromptWriter {
 public:
  explicit PromptWriter(const Engine& engine) : engine_(engine), most_(most_counted(engine.model().context)) {
    const std::vector<int32_t> letter = tokenize("a");
    adds_space_ = !letter.empty() && engine.token_text(letter[0]).starts_with(' ');
    // What the tokenizer puts in front of every text.
    const std::vector<int32_t> whole = engine.tokenize("a", true, false);
    tokens_.assign(whole.begin(), std::search(whole.begin(), whole.end(), letter.begin(), letter.end()));
  }

  void token(int32_t id) {
    if (id >= 0) tokens_.push_back(id);
  }
  void text(std::string_view text) {
    if (tokens_.size() > most_ || text.empty()) return;
    append(tokenize(text));
  }
  // Text that goes on: a tokenizer which begins every text with a space is kept from it by a character in
  // front.
  void text_inside(std::string_view text) {
    if (tokens_.size() > most_ || text.empty()) return;
    constexpr std::string_view kMark = "\u263a";
    const std::vector<int32_t> mark = adds_space_ ? tokenize(kMark) : std::vector<int32_t>();
    std::vector<int32_t> all = tokenize(adds_space_ ? std::string(kMark).append(text) : std::string(text));
    const bool starts = all.size() >= mark.size() && std::equal(mark.begin(), mark.end(), all.begin());
    if (!starts) all = tokenize(text);
    all.erase(all.begin(), all.begin() + (starts ? std::ssize(mark) : 0));
    append(all);
  }
  std::vector<int32_t> take() { return std::move(tokens_); }

 private:
  std::vector<int32_t> tokenize(std::string_view text) const {
    return engine_.tokenize(text, false, false, most_);
  }
  void append(const std::vector<int32_t>& more) { tokens_.insert(tokens_.end(), more.begin(), more.end()); }

  const Engine& engine_;
  const size_t most_;
  bool adds_space_ = false;
  std::vector<int32_t> tokens_;
};

void write_files(PromptWriter& to, const ModelInfo::Infill& infill, const Gap& gap) {
  if (gap.files.empty()) return;
  const bool marked = infill.repository >= 0 && infill.file >= 0;
  if (marked) {
    to.token(infill.repository);
    to.text_inside(kRepository);
  }
  for (const Gap::File& file : gap.files) {
    if (marked) to.token(infill.file);
    to.text_inside(file.name + "\n" + file.text + (marked ? "" : "\n\n"));
  }
  if (!marked) return;
  to.token(infill.file);
  to.text_inside(kThisFile);
}

}  // namespace

std::vector<int32_t> infill_prompt(const Engine& engine, const Gap& gap) {
  const ModelInfo::Infill& infill = engine.model().infill;
  PromptWriter to(engine);
  write_files(to, infill, gap);
  const auto before = [&] {
    to.token(infill.prefix);
    to.text(gap.prefix);
  };
  const auto behind = [&] {
    to.token(infill.suffix);
    to.text_inside(gap.suffix);
  };
  if (infill.suffix_first) {
    behind();
    before();
  } else {
    before();
    behind();
    to.token(infill.middle);
  }
  return to.take();
}

}  // namespace millrace::server
