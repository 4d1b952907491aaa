// millrace tune: times the variants of the GPU's kernels for a model's shapes and keeps what was best in a
// file that every later start reads.
#include "tune.h"

#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "backend/tuning.h"
#include "base/error.h"
#include "base/mapped_file.h"
#include "engine/runtime.h"
#include "model/weight_source.h"
#include "model_names.h"
#include "model_options.h"
#include "output.h"

namespace millrace::cli {
namespace {

using Json = nlohmann::ordered_json;

struct TuneOptions {
  std::string model, device = "cuda";
  int32_t most_rows = 4096;
  bool print = false, json = false;
};

constexpr const char* kTuneFooter =
    "Some products can be computed by several kernels, all with the same bits; which is fastest depends on "
    "the\n"
    "shape, the number of rows and the GPU. This times them and writes the choices to\n"
    "  $XDG_CACHE_HOME/millrace/tune-GPU-DRIVER.json (or ~/.cache/millrace/...)\n"
    "which run, chat, serve and bench read when they start. Without the file, or with one of another build, "
    "they use\n"
    "built-in choices; nothing is timed behind your back. Delete the file to be rid of it.\n"
    "Examples:\n"
    "  millrace tune model.gguf                   # the shapes of this model\n"
    "  millrace tune                              # those of gpt-oss-20b, 8-bit and bf16\n"
    "  millrace tune model.gguf --device cuda:1   # another GPU\n"
    "  millrace tune --print                      # the table in use\n"
    "  millrace tune --print --json | jq '.entries[] | {what, rows, choice}'";

constexpr int64_t kLogitRows = 128;

// gpt-oss-20b: 64 heads of 64, 8 for keys and values.
std::vector<TuningShape> known_shapes(int64_t most_rows) {
  std::vector<TuningShape> shapes;
  for (const DType type : {DType::kQ8_0, DType::kBF16}) {
    shapes.push_back({"q, k, v", {{type, 4096}, {type, 512}, {type, 512}}, 2880, false, most_rows});
    shapes.push_back({"projection", {{type, 2880}}, 4096, true, most_rows});
    shapes.push_back({"logits", {{type, 201088}}, 2880, false, std::min(most_rows, kLogitRows)});
  }
  return shapes;
}

// The products of a model's first layer, and its logits; experts have one kernel each.
std::vector<TuningShape> shapes_of(const std::string& path, int64_t most_rows) {
  const io::Checkpoint checkpoint = io::Checkpoint::open(path);
  const ModelConfig c = read_config(checkpoint);
  WeightSource source(checkpoint, c, false);
  const int64_t q = int64_t{c.heads} * c.head_dim, kv = int64_t{c.kv_heads} * c.head_dim;
  std::vector<TuningShape> shapes;
  const auto add = [&](const char* what, int layer, int64_t cols, bool adds, int64_t rows,
                       std::initializer_list<std::pair<const char*, int64_t>> parts) {
    TuningShape shape{what, {}, cols, adds, rows};
    for (const auto& [role, outputs] : parts) {
      const std::optional<TensorView> view = source.find(layer, role, {outputs, cols});
      if (view) shape.parts.push_back({view->type, outputs});
    }
    if (!shape.parts.empty()) shapes.push_back(std::move(shape));
  };
  add("q, k, v", 0, c.hidden, false, most_rows,
      {{"attn_q.weight", q}, {"attn_k.weight", kv}, {"attn_v.weight", kv}});
  add("projection", 0, q, true, most_rows, {{"attn_output.weight", c.hidden}});
  if (c.ffn > 0) {
    add("gate, up", 0, c.hidden, false, most_rows, {{"ffn_gate.weight", c.ffn}, {"ffn_up.weight", c.ffn}});
    add("down", 0, c.ffn, true, most_rows, {{"ffn_down.weight", c.hidden}});
  }
  const bool tied = !source.find(-1, "output.weight", {c.vocab, c.hidden});
  add("logits", -1, c.hidden, false, std::min(most_rows, kLogitRows),
      {{tied ? "token_embd.weight" : "output.weight", c.vocab}});
  return shapes;
}

constexpr const char* kHeading =
    "product      kernel         format  outputs  columns    rows  choice                     us each\n";

std::string line_of(const TuningEntry& entry) {
  std::string times;
  for (const TuningTime& time : entry.times) {
    times += (times.empty() ? "" : ", ") +
             (time.us > 0 ? fmt::format("{} {:.1f}", time.candidate, time.us) : time.candidate);
  }
  return fmt::format("{:<12} {:<14} {:<6} {:>8} {:>8} {:>7}  {:<26} {}\n", entry.what, entry.key.kernel,
                     entry.key.format, entry.key.outputs, entry.key.cols, entry.key.rows, entry.choice,
                     times);
}

// The table of the file, without entries when there is none for this GPU and build.
TuningTable kept_table(const TuningTarget& target, const std::string& path) {
  if (!std::filesystem::exists(path)) return {target, {}};
  TuningTable table = parse_tuning(read_text_file(path), path);
  return table.target == target ? table : TuningTable{target, {}};
}

void print_table(const TuningTable& table, const std::string& path, bool json) {
  if (json) {
    Json out = Json::parse(tuning_text(table));
    out["path"] = path;
    return write_json(out);
  }
  std::string out =
      fmt::format("{}, driver {}, {}\n", table.target.device, table.target.driver, table.target.build);
  if (table.entries.empty()) {
    out += fmt::format("{} has no choices for it: built-in ones are used\n", path);
  } else {
    out += fmt::format("{}\n\n{}", path, kHeading);
    for (const TuningEntry& entry : table.entries) out += line_of(entry);
  }
  write_stdout(out);
}

int tune(const TuneOptions& options) {
  const std::vector<TuningShape> shapes =
      options.model.empty() ? known_shapes(options.most_rows)
                            : shapes_of(find_model(options.model, default_options()), options.most_rows);
  const std::unique_ptr<Backend> backend = make_backend(options.device, {});
  const std::optional<TuningTarget> target = backend->tuning_target();
  if (!target) {
    throw_error(ErrorCode::kBadInput, "device {}: has no kernels to choose from, expected cuda or cuda:N",
                options.device);
  }
  const std::string path = tuning_file(*target);
  if (options.print) {
    print_table(kept_table(*target, path), path, options.json);
    return 0;
  }
  if (!options.json) write_stdout(fmt::format("{}\n\n{}", backend->description(), kHeading));
  const TuningTable made = backend->autotune(shapes, [&](const TuningEntry& entry) {
    if (!options.json) write_stdout(line_of(entry));
  });
  TuningTable old{*target, {}};
  try {
    old = kept_table(*target, path);
  } catch (const Error&) {  // a damaged file is replaced
  }
  const TuningTable all = merge_tuning(old, made);
  write_tuning(all, path);
  if (options.json) {
    print_table(all, path, true);
  } else {
    write_stdout(fmt::format("\nwritten to {}\n", path));
  }
  return 0;
}

}  // namespace

void add_tune(CommandLine& line) {
  Command command = line.add("tune", "choose the fastest kernels for a GPU, once");
  auto options = std::make_shared<TuneOptions>();
  command.option("MODEL", options->model,
                 "whose shapes count (a file, a directory or a name); else gpt-oss-20b's");
  command.option("--device", options->device, "cuda or cuda:N (one of several GPUs)").show_default();
  command.option("--rows", options->most_rows, "tokens of a step up to which to tune")
      .range(8, 8192)
      .show_default();
  command.flag("--print", options->print, "print the table that is in use; time nothing");
  command.flag("--json", options->json, "one JSON object");
  command.footer(kTuneFooter);
  command.refuse_unless(
      "--rows", [options] { return !options->print; }, "with --print, which times nothing");
  command.check([options] {
    if (options->print && !options->model.empty())
      throw UsageError("--print shows the whole table and takes no MODEL");
  });
  command.runs([options] { return tune(*options); });
}

}  // namespace millrace::cli
