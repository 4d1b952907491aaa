#include "engine/runtime.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "base/check.h"
#include "base/error.h"
#include "base/sparse_pages.h"
#include "engine/adapter_set.h"
#include "engine/checkpoint_identity.h"
#include "engine/engine_options.h"
#include "engine/fp8_names.h"
#include "engine/leader_executor.h"
#include "engine/load_tokenizer.h"
#include "engine/lock_memory.h"
#include "engine/open_backend.h"
#include "engine/pipeline_executor.h"
#include "engine/pool_size.h"
#include "engine/rank_group.h"
#include "engine/rank_launcher.h"
#include "engine/rank_plan.h"
#include "engine/remote_executor.h"
#include "engine/weight_types.h"
#include "io/printable.h"
#include "kernels/quant/codec.h"
#include "kernels/quant/kv_types.h"
#include "model/architecture.h"
#include "sample/token_softmax.h"

namespace millrace {
namespace {

// A NaN among the logits has a cause; name it if it lies in the file.
[[noreturn]] void explain_nan(const io::Checkpoint& checkpoint) {
  for (const TensorView& tensor : checkpoint.tensors()) {
    if (tensor.type == DType::kI32 || tensor.type == DType::kU8 || tensor.type == DType::kF8E4M3) continue;
    for (int64_t row = 0; row < tensor.rows(); ++row) {
      if (quant::scales_are_finite(tensor, row)) continue;
      throw_error(ErrorCode::kBadInput,
                  "{}: tensor {}: row {}: found NaN or infinity, expected finite values and scales",
                  checkpoint.path(), tensor.name, row);
    }
  }
  throw_error(ErrorCode::kBadInput,
              "{}: logits: found NaN, expected numbers; every weight is finite, so the values overflow",
              checkpoint.path());
}

// Of the process that ranks are started by: it computes nothing but tokens from logits.
EngineOptions front_options(EngineOptions options) {
  if (options.device == "auto") options.device = "cpu";
  options.threads = 1;
  return options;
}

// Of what FP8 products are not made for yet, the first.
void check_fp8(const ModelConfig& config, const std::string& path) {
  const char* found = config.experts > 0       ? "experts"
                      : config.latent.rank > 0 ? "latent attention"
                      : config.state.present() ? "layers with a state"
                                               : nullptr;
  if (found == nullptr) return;
  throw_error(ErrorCode::kUnsupported, "{}: compute: found fp8 for {}, a model with {}, expected one without",
              path, config.architecture, found);
}

}  // namespace

std::unique_ptr<Runtime> Runtime::open(const EngineOptions& options, RuntimeSetup setup) {
  check_options(options);
  if (!setup.weights.choice) setup.weights = millrace::weight_types(options);
  std::unique_ptr<Runtime> r(new Runtime);
  r->checkpoint_ = io::Checkpoint::open(options.model);
  r->weight_types_ = setup.weights;
  ModelConfig config = read_config(r->checkpoint_);
  AdapterSet adapters = r->open_adapters(config, options, setup);
  r->budget_pages_ = options.attention_budget / kBlockTokens;
  r->fp8_prompts_ = options.compute == "fp8";
  if (r->fp8_prompts_) check_fp8(config, options.model);
  r->own_sparse_pages_ = options.attention == "sparse" ? r->budget_pages_ : 0;
  r->open_device(config, options, setup, adapters);
  check_context(config, *r->backend_, options, setup);
  r->spec_ = runtime_spec(r->checkpoint_, config, *r->backend_, options, setup);
  r->load_tokenizer_of(config);
  r->load_model(options, setup, std::move(adapters));
  config.rope_inv_freq = r->model_->config().rope_inv_freq;  // what names the cache's blocks on disk
  r->head_ = ClassifierHead::read(r->checkpoint_, config);
  r->open_images(config, options, setup);
  if (r->front_) {
    r->start_ranks(options, setup);
  } else {
    r->make_executor(setup);
  }
  r->make_cache(config, options, setup);
  if (options.lock) lock_memory();
  return r;
}

AdapterSet Runtime::open_adapters(const ModelConfig& config, const EngineOptions& options,
                                  RuntimeSetup& setup) {
  AdapterSet adapters = read_adapters(options, checkpoint_, config);
  for (const Adapter& adapter : adapters.adapters) adapter_names_.push_back(adapter.name);
  adapter_identities_ = adapters.identities;
  adapter_bytes_ = adapters.bytes;
  setup.adapter_rank = adapters.max_rank;
  setup.adapter_features = adapters.features;
  MILLRACE_CHECK(setup.adapter < std::ssize(adapters.adapters));
  own_adapter_ = setup.adapter;
  return adapters;
}

// The backend, and the ranks that this process is one of or has in front of it.
void Runtime::open_device(const ModelConfig& config, const EngineOptions& options, RuntimeSetup& setup,
                          const AdapterSet& adapters) {
  const bool outside = ranks_of(options) > 1 && !options.launcher.empty();
  const RankShare ranks =
      outside ? share_before_ranks(config, options, setup) : join_ranks(config, options, setup);
  ChosenBackend chosen =
      open_backend(checkpoint_, config, outside ? front_options(options) : options, setup, ranks);
  if (outside) {
    std::vector<dist::Claim> claims = rank_claims(checkpoint_, config, options, adapters, *chosen.backend);
    front_ = std::make_unique<RankFront>(
        options, [claims](const EngineOptions& o) { return with_options(claims, o); }, setup.wake);
    chosen.backend = make_remote_backend(std::move(chosen.backend), *front_, ranks_of(options),
                                         options.tensor_parallel > 1 && options.pipeline_parallel == 1);
  }
  if (group_ != nullptr) {
    check_ranks_agree(*group_, checkpoint_, config, options, adapters, *chosen.backend);
  }
  backend_ = std::move(chosen.backend);
  device_note_ = std::move(chosen.note);
}

// What a process plans for that starts its ranks.
RankShare Runtime::share_before_ranks(const ModelConfig& config, const EngineOptions& options,
                                      RuntimeSetup& setup) {
  check_stages(config, options);
  if (options.tensor_parallel > 1 && !options.expert_parallel &&
      !can_share_rows(checkpoint_, config)) {  // before they start
    throw_error(
        ErrorCode::kUnsupported,
        "{}: {} is not to be shared by rows, expected one process, or --pipeline-parallel where layers "
        "do not read one another",
        options.model, config.architecture);
  }
  // Memory is planned for the whole where all ranks are here and use the machine's, else for the first
  // one's part: its GPU may be its own.
  const bool here = ranks_are_here(options);
  if (here && !options.device.starts_with("cuda")) return {};
  shares_ = shares_of(options, 0, checkpoint_, config);
  const RankShare ranks = {nullptr, &*shares_, 0, here ? ranks_of(options) : most_on_a_host(options)};
  setup.local_ranks = here ? 1 : ranks.local_ranks;
  return ranks;
}

// This process's part among ranks that are there; of a process alone, nothing.
RankShare Runtime::join_ranks(const ModelConfig& config, const EngineOptions& options, RuntimeSetup& setup) {
  if (ranks_of(options) == 1 && setup.group == nullptr) return {};
  check_stages(config, options);
  group_ = setup.group != nullptr ? setup.group : job_group(options);
  shares_ =
      shares_of(with_measured_speeds(options, *group_, checkpoint_), group_->rank(), checkpoint_, config);
  groups_.emplace(*group_, *shares_);
  const HostPlace place = place_on_host(*group_);
  setup.local_ranks = place.local_ranks;
  return {groups_->of_stage(), &*shares_, place.local_rank, place.local_ranks};
}

// Ranks that are in front of it have the weights, and are yet to be started.
void Runtime::load_model(const EngineOptions& options, const RuntimeSetup& setup, AdapterSet adapters) {
  model_ = Model::load(checkpoint_, *backend_, front_ ? LoadProgress() : options.on_load,
                       setup.weights.choice, setup.weights.inputs, setup.adapter_features);
  if (!adapters.adapters.empty()) model_->add_adapters(std::move(adapters.adapters), *backend_);
  model_->settle_context(spec_.max_context);
  stepping_ = model_.get();
  if (model_->unpacked().empty()) return;
  std::string& note = weight_types_.note;
  note = model_->unpacked() + (note.empty() ? "" : "; " + note);
}

// What reads images, or why nothing does. A file that was named for it has to do.
void Runtime::open_images(const ModelConfig& config, const EngineOptions& options,
                          const RuntimeSetup& setup) {
  const bool named = !options.mmproj.empty();
  const auto refuse = [&](std::string why) {
    if (named) throw_error(ErrorCode::kUnsupported, "--mmproj {}: {}", options.mmproj, why);
    images_.refusal = std::move(why);
  };
  const auto text = architecture_of(config).image_text();
  if (!text)
    return refuse(fmt::format("models of the architecture {} take no images here", config.architecture));
  if (!setup.shared()) return refuse("this command takes no images");
  if (backend_->lacks().has(OpFeature::kImages)) {
    return refuse(
        fmt::format("{} {} takes no images yet; use --device cpu",
                    backend_->shares() == nullptr ? "the device" : "a model over ranks with the device",
                    backend_->name()));
  }
  if (!tokenizer_) return refuse("the model has no tokenizer");
  const std::vector<int32_t> token =
      tokenizer_->encode(text->token, {.add_special = false, .parse_special = true});
  if (token.size() != 1) return refuse(fmt::format("the vocabulary has no {}", text->token));
  io::Checkpoint tower = named ? io::Checkpoint::open(options.mmproj) : checkpoint_;
  if (!named && (checkpoint_.gguf || !VisionTower::is_in(tower))) {
    return refuse(checkpoint_.gguf ? "the model has no vision tower beside it: --mmproj names one"
                                   : "the model has no vision tower");
  }
  if (named && !tower.gguf) return refuse("found a directory, expected a GGUF file");
  BackendOptions own{.threads = options.threads};
  std::unique_ptr<Backend> backend = make_backend(backend_->name() == "reference" ? "reference" : "cpu", own);
  try {
    image_reader_ =
        std::make_unique<ImageReader>(std::move(tower), text->projector, config.hidden, std::move(backend));
  } catch (const Error& error) {
    return refuse(error.what());
  }
  images_see_both_ways_ = text->both_ways;
  const VisionTower& own_tower = image_reader_->tower();
  if (own_tower.further() >= config.layers) {
    const int32_t further = own_tower.further();
    image_reader_.reset();
    return refuse(
        fmt::format("the vision tower has rows for {} layers, the model {}", further, config.layers));
  }
  const int32_t rows = (text->both_ways ? own_tower.grid_of(1, 1).tokens : 0) + options.max_running;
  if (spec_.max_tokens < rows) {
    image_reader_.reset();
    return refuse(
        fmt::format("a step has {} rows, an image and those who run need {}: --step-tokens raises it",
                    spec_.max_tokens, rows));
  }
  images_ = {.token = token.front(),
             .refusal = {},
             .written = std::string(text->written),
             .expanded = std::string(text->expanded)};
}

std::string_view Runtime::adapter_identity(int32_t adapter) const {
  return adapter < 0 ? std::string_view() : adapter_identities_.at(static_cast<size_t>(adapter));
}

int32_t Runtime::adapter_number(const std::string& name) const {
  if (name.empty()) return -1;
  const auto found = std::find(adapter_names_.begin(), adapter_names_.end(), name);
  if (found != adapter_names_.end()) return static_cast<int32_t>(found - adapter_names_.begin());
  throw_error(ErrorCode::kBadInput, "adapter: found {}, expected {}", io::printable(name),
              adapter_names_.empty() ? "none: the model has no adapters"
                                     : fmt::format("one of {}", fmt::join(adapter_names_, ", ")));
}

// A damaged or missing tokenizer is an error only for those who need one.
void Runtime::load_tokenizer_of(const ModelConfig& config) {
  try {
    tokenizer_ = load_tokenizer(checkpoint_);
    end_tokens_ = tokenizer_->end_tokens();
  } catch (const Error& error) {
    tokenizer_error_ = error.what();
  }
  for (const int32_t id : config.end_tokens) {
    if (std::find(end_tokens_.begin(), end_tokens_.end(), id) == end_tokens_.end()) end_tokens_.push_back(id);
  }
}

// Until they have loaded their parts. Who waits is told of it, and may throw.
void Runtime::start_ranks(const EngineOptions& options, const RuntimeSetup& setup) {
  const auto tick = [&] {
    if (!options.on_load) return;
    const RankFront::Loaded loaded = front_->loaded();
    options.on_load(loaded.done, loaded.all > 0 ? loaded.all : checkpoint_.mapped_bytes());
  };
  front_->start(tick);
  make_executor(setup);
  constexpr auto kLookAgain = std::chrono::milliseconds(10);
  for (; !remote_->attached(); tick()) std::this_thread::sleep_for(kLookAgain);
}

void Runtime::make_executor(const RuntimeSetup& setup) {
  if (group_ != nullptr) {
    executor_ = make_leader(*groups_, *shares_, spec_, *backend_);
    pipeline_ = dynamic_cast<PipelineLeader*>(executor_.get());
  } else {
    executor_ = backend_->make_executor(spec_);
    remote_ = dynamic_cast<RemoteExecutor*>(executor_.get());
  }
  if (setup.wrap_executor) executor_ = setup.wrap_executor(std::move(executor_));
  // A step with more drafts than any before it is no reason to allocate.
  tokens_.reserve(static_cast<size_t>(spec_.max_tokens));
  logit_rows_.reserve(static_cast<size_t>(spec_.max_logit_rows));
  if (executor_->works_ahead()) sampled_rows_.reserve(static_cast<size_t>(spec_.max_tokens));
}

void Runtime::fall_back_to_cpu(int threads) {
  MILLRACE_CHECK(fallback_backend_ == nullptr && group_ == nullptr);
  std::unique_ptr<Backend> backend = make_backend("cpu", {.threads = threads});
  std::unique_ptr<Model> model =
      Model::load(checkpoint_, *backend, {}, weight_types_.choice, weight_types_.inputs);
  model->settle_context(spec_.max_context);
  std::unique_ptr<Executor> executor = backend->make_executor(spec_);
  fallback_backend_ = std::move(backend);
  fallback_model_ = std::move(model);
  stepping_ = fallback_model_.get();
  lost_executor_ = std::move(executor_);
  executor_ = std::move(executor);
  store_->use(*executor_);
}

void Runtime::make_cache(const ModelConfig& config, const EngineOptions& options, const RuntimeSetup& setup) {
  kv::CacheOptions cache;
  // What an encoder makes of a token depends on those behind it: nothing of it is anybody else's.
  cache.prefix_cache = setup.shared() && options.prefix_cache && !config.encoder;
  if (setup.shared()) {
    cache.ram_bytes = options.ram_tier_bytes;
    cache.disk_directory = options.kv_dir;
    cache.disk_bytes = options.kv_dir_bytes;
  }
  if (setup.adjust_cache) setup.adjust_cache(cache);
  for (size_t g = 0; g < spec_.kv_groups.size(); ++g) {
    cache.groups.push_back({.window = spec_.kv_groups[g].window,
                            .num_blocks = spec_.kv_groups[g].num_blocks,
                            .block_bytes = spec_.kv_block_bytes(static_cast<int>(g)),
                            .sparse = spec_.kv_groups[g].state,
                            .shelves = spec_.kv_groups[g].shelves,
                            .boundary_tokens = spec_.kv_groups[g].states_apart});
  }
  cache.element_bytes = bytes_of(spec_.kv_type, 1);  // 0 for a type of blocks
  cache.table_tokens = spec_.max_context;
  // The order of bytes in a block is the device's own, and so are the last bits of a number.
  cache.identity =
      fmt::format("{} {} {} {} {}", checkpoint_identity(checkpoint_, config), kv_layout_name(spec_.kv_type),
                  backend_->name(), backend_->isa(), weight_types_.identity);
  store_ = std::make_unique<ExecutorStore>(*executor_);
  cache_ = std::make_unique<kv::Cache>(std::move(cache), *store_);
}

void Runtime::attach_ranks() { remote_->attach(); }
bool Runtime::ranks_attached() { return remote_->attached(); }

std::shared_ptr<const Tokenizer> Runtime::shared_tokenizer() const {
  if (!tokenizer_) throw Error(ErrorCode::kBadInput, tokenizer_error_);
  return tokenizer_;
}

const Tokenizer& Runtime::tokenizer() const { return *shared_tokenizer(); }

const ChatTemplate* Runtime::chat_template() {
  if (!chat_template_) {
    const std::string text = chat_template_text(checkpoint_);
    if (text.empty()) return nullptr;
    chat_template_.emplace(text, checkpoint_.path());
  }
  return &*chat_template_;
}

kv::Sequence Runtime::make_sequence() {
  return cache_->make_sequence({}, block_variant(own_adapter_, own_sparse_pages_));
}

int32_t Runtime::sparse_pages(const std::string& attention, int32_t budget) const {
  if (!attention.empty() && attention != "full" && attention != "sparse") {
    throw_error(ErrorCode::kBadInput, "attention: found {}, expected full or sparse",
                io::printable(attention));
  }
  const bool sparse = attention.empty() ? own_sparse_pages_ > 0 : attention == "sparse";
  if (budget != 0 && !sparse) {
    throw_error(ErrorCode::kBadInput,
                "attention_budget: found {} with full attention, expected it with sparse", budget);
  }
  if (!sparse) return 0;
  if (!spec_.page_summaries) {
    throw_error(ErrorCode::kUnsupported,
                "attention: found sparse, expected full: this engine was not opened with --attention sparse "
                "or request");
  }
  if (budget == 0) return budget_pages_;
  if (budget < kLeastSparseBudget) {
    throw_error(ErrorCode::kBadInput, "attention_budget: found {}, expected at least {} tokens", budget,
                kLeastSparseBudget);
  }
  return budget / kBlockTokens;
}

std::string Runtime::block_variant(int32_t adapter, int32_t sparse_pages) const {
  std::string variant(adapter_identity(adapter));
  if (sparse_pages > 0) variant += fmt::format("\nsparse {}", sparse_pages);
  return variant;
}

void Runtime::check_tokens(std::span<const int32_t> tokens) const {
  for (const int32_t token : tokens) {
    if (token < 0 || token >= spec_.vocab) {
      throw_error(ErrorCode::kBadInput, "token id: found {}, expected 0 to {}", token, spec_.vocab - 1);
    }
  }
}

void Runtime::check_generates() const {
  if (!config().encoder) return;
  throw_error(ErrorCode::kUnsupported,
              "{} is a text encoder ({}): it writes no text, `millrace serve` gives its embeddings",
              config().name, config().architecture);
}

void Runtime::check_input(const StepInput& input) const {
  check_generates();  // nor are an encoder's texts fed in pieces: the engine takes them whole
  const int64_t end =
      static_cast<int64_t>(input.sequence->length()) + static_cast<int64_t>(input.tokens.size());
  if (end > spec_.max_context) {
    throw_error(ErrorCode::kBadInput,
                "prompt: found {} tokens, expected at most the context of {} (--ctx raises it)", end,
                spec_.max_context);
  }
  check_tokens(input.tokens);
}

void Runtime::compute(std::span<const Slice> slices) {
  tokens_.clear();
  batch_.clear();
  logit_rows_.clear();
  sampled_rows_.clear();
  given_.clear();
  rope_positions_.clear();
  const bool takes_sampled =
      std::any_of(slices.begin(), slices.end(), [](const Slice& slice) { return slice.sampled_row >= 0; });
  const bool in_grids =
      !config().rope_axes.empty() &&
      std::any_of(slices.begin(), slices.end(), [](const Slice& slice) { return !slice.images.empty(); });
  for (const Slice& slice : slices) {
    const auto first = static_cast<int32_t>(tokens_.size());
    const auto count = static_cast<int32_t>(slice.tokens.size());
    SequenceSlice piece{.first_row = first,
                        .num_tokens = count,
                        .context_len = slice.sequence->length() + slice.ahead,
                        .tables = {},
                        .adapter = slice.adapter,
                        .second_text = slice.second_text,
                        .fp8_until = slice.fp8_until,
                        .sparse_pages = slice.sparse_pages};
    for (size_t g = 0; g < spec_.kv_groups.size(); ++g) {
      piece.tables[g] = slice.sequence->table(static_cast<int>(g));
    }
    tokens_.insert(tokens_.end(), slice.tokens.begin(), slice.tokens.end());
    if (slice.images.empty()) {
      batch_.push_back(piece);
    } else {
      add_with_images(piece, slice.images);
    }
    if (in_grids) add_rope_positions(piece, slice.images);
    if (takes_sampled) sampled_rows_.resize(tokens_.size(), slice.sampled_row);
    if (slice.want == Slice::Want::kLast && count > 0) logit_rows_.push_back(first + count - 1);
    if (slice.want == Slice::Want::kAll) {
      for (int32_t i = 0; i < count; ++i) logit_rows_.push_back(first + i);
    }
  }
  MILLRACE_CHECK(tokens_.size() <= static_cast<size_t>(spec_.max_tokens));
  MILLRACE_CHECK(logit_rows_.size() <= static_cast<size_t>(spec_.max_logit_rows));
  const bool hidden =
      std::any_of(slices.begin(), slices.end(), [](const Slice& slice) { return slice.hidden; });
  forward_in_parts(*stepping_, *executor_, pipeline_,
                   {.tokens = tokens_,
                    .sequences = batch_,
                    .logit_rows = logit_rows_,
                    .sampled_rows = sampled_rows_,
                    .only_logits = !hidden,
                    .given = given_,
                    .rope_positions = rope_positions_});
}

// Those of an image's rows that are in these.
void Runtime::add_given(const SequenceSlice& whole, const ImagePlace& image) {
  const int32_t begin = whole.context_len, end = begin + whole.num_tokens;
  const int64_t cols = std::ssize(*image.rows) / image.tokens;
  for (int32_t p = std::max(image.first, begin); p < std::min(image.first + image.tokens, end); ++p) {
    const int32_t row = whole.first_row + p - begin;
    tokens_[static_cast<size_t>(row)] = 0;  // any that is in the table
    given_.push_back({.row = row,
                      .values = image.rows->data() + (p - image.first) * cols,
                      .further = static_cast<int32_t>(cols / spec_.hidden) - 1});
  }
}

// Three of each row. A text counts on from the largest before it; an image's tokens have the time of its
// first, and count down and across from there.
void Runtime::add_rope_positions(const SequenceSlice& whole, std::span<const ImagePlace> images) {
  const int32_t begin = whole.context_len, end = begin + whole.num_tokens;
  int32_t ahead = 0;  // by how much the rows' places in the sequence are
  size_t next = 0;
  for (int32_t p = begin; p < end; ++p) {
    while (next < images.size() && images[next].first + images[next].tokens <= p) {
      ahead += images[next].tokens - std::max(images[next].down, images[next].across);
      ++next;
    }
    const bool inside = next < images.size() && images[next].first <= p;
    const int32_t at = (inside ? images[next].first : p) - ahead;
    const int32_t within = inside ? p - images[next].first : 0;
    const int32_t across = inside ? images[next].across : 1;
    rope_positions_.insert(rope_positions_.end(), {at, at + within / across, at + within % across});
  }
}

// A sequence's rows in pieces: texts, and images, whose tokens see one another; one piece where they do not.
void Runtime::add_with_images(const SequenceSlice& whole, std::span<const ImagePlace> images) {
  if (!images_see_both_ways_) {
    batch_.push_back(whole);
    for (const ImagePlace& image : images) add_given(whole, image);
    return;
  }
  const int32_t begin = whole.context_len, end = begin + whole.num_tokens;
  const auto add = [&](int32_t from, int32_t to, bool image) {
    if (from >= to) return;
    SequenceSlice piece = whole;
    piece.first_row = whole.first_row + from - begin;
    piece.num_tokens = to - from;
    piece.context_len = from;
    piece.both_ways = image;
    batch_.push_back(piece);
  };
  int32_t at = begin;
  for (const ImagePlace& image : images) {
    const int32_t first = std::max(image.first, begin), last = image.first + image.tokens;
    if (last <= begin || first >= end) continue;
    MILLRACE_CHECK(last <= end);
    add(at, first, false);
    add(first, last, true);
    at = last;
    add_given(whole, image);
  }
  add(at, end, false);
}

Pooling Runtime::pooling() const {
  switch (config().pooling) {
    case ModelConfig::Pooling::kFirst:
      return Pooling::kFirst;
    case ModelConfig::Pooling::kLast:
      return Pooling::kLast;
    case ModelConfig::Pooling::kMean:
      break;
  }
  return Pooling::kMean;
}

std::span<const float> Runtime::forward(std::span<const Slice> slices) {
  compute(slices);
  return executor_->logits();
}

void Runtime::check_logits(std::span<const float> row) const {
  // A sum is NaN exactly when a term is (or infinities of both signs meet, which is as bad).
  float sum = 0;
  for (const float x : row) sum += x;
  if (std::isnan(sum)) explain_nan(checkpoint_);
}

void Runtime::explain_no_token(int32_t sampled) const {
  if (sampled == SampledRow::kNotANumber) explain_nan(checkpoint_);
  throw_no_logits(static_cast<size_t>(spec_.vocab));
}

int32_t Runtime::prompt_until(const StepInput& input) const {
  return input.prompt ? fp8_until(static_cast<size_t>(input.sequence->length()) + input.tokens.size()) : 0;
}

void Runtime::compute_inputs(std::span<const StepInput> inputs) {
  for (const StepInput& input : inputs) check_input(input);
  step_slices_.clear();
  for (const StepInput& input : inputs) {
    const auto count = static_cast<int32_t>(input.tokens.size());
    if (!cache_->reserve(*input.sequence, count)) {
      throw_error(ErrorCode::kNoMemory,
                  "kv cache: found no free block for {} more tokens, expected room for {} contexts of {}",
                  count, inputs.size(), spec_.max_context);
    }
    step_slices_.push_back({.sequence = input.sequence,
                            .tokens = input.tokens,
                            .want = input.want,
                            .adapter = own_adapter_,
                            .sparse_pages = own_sparse_pages_,
                            .fp8_until = prompt_until(input)});
  }
  compute(step_slices_);
}

void Runtime::advance(std::span<const StepInput> inputs) {
  for (const StepInput& input : inputs)
    advance_named(*cache_, *input.sequence, input.tokens, prompt_until(input), named_);
}

std::span<const float> Runtime::checked_logits() {
  const std::span<const float> logits = executor_->logits();
  for (size_t row = 0; row < logit_rows_.size(); ++row) {
    check_logits(logits.subspan(row * spec_.vocab, spec_.vocab));
  }
  return logits;
}

std::span<const float> Runtime::step(std::span<const StepInput> inputs) {
  compute_inputs(inputs);
  advance(inputs);
  return checked_logits();
}

std::span<const int32_t> Runtime::step_greedy(std::span<const StepInput> inputs) {
  compute_inputs(inputs);
  const std::span<const int32_t> found = executor_->greedy_tokens();
  advance(inputs);
  if (found.empty()) {  // the device leaves it to us
    const std::span<const float> logits = checked_logits();
    greedy_.clear();
    for (size_t row = 0; row < logit_rows_.size(); ++row) {
      greedy_.push_back(std::max(0, argmax(logits.subspan(row * spec_.vocab, spec_.vocab))));
    }
    return greedy_;
  }
  for (const int32_t token : found) {
    if (token < 0) explain_nan(checkpoint_);
  }
  return found;
}

void Runtime::repeat_last_block(kv::Sequence& sequence, int32_t tokens) {
  MILLRACE_CHECK(sequence.length() >= kBlockTokens && sequence.length() % kBlockTokens == 0 &&
                 tokens % kBlockTokens == 0);
  const std::vector<int32_t> some(kBlockTokens, 0);
  for (int32_t done = 0; done < tokens; done += kBlockTokens) {
    const int32_t block = sequence.length() / kBlockTokens;
    if (sequence.length() + kBlockTokens > spec_.max_context || !cache_->reserve(sequence, kBlockTokens)) {
      throw_error(ErrorCode::kNoMemory, "kv cache: found no room for token {}, expected a context of {}",
                  sequence.length() + kBlockTokens, spec_.max_context);
    }
    for (int g = 0; g < static_cast<int>(spec_.kv_groups.size()); ++g) {
      const int32_t* table = sequence.table(g);
      executor_->copy_block(g, table[block - 1], table[block]);
    }
    cache_->advance(sequence, some);
  }
}

void Runtime::generate_greedy(kv::Sequence& sequence, int32_t token, std::span<int32_t> out) {
  if (!executor_->works_ahead()) {
    for (int32_t& next : out) {
      const StepInput input{&sequence, {&token, 1}, StepInput::Want::kLast};
      token = next = step_greedy({&input, 1})[0];
    }
    return;
  }
  check_input({.sequence = &sequence, .tokens = {&token, 1}});
  SampleRow greedy;
  greedy.wanted = true;
  size_t launched = 0;
  const auto launch_next = [&] {
    const auto ahead = launched == 0 ? 0 : 1;  // of what counts as computed
    if (sequence.length() + ahead + 1 > spec_.max_context || !cache_->reserve(sequence, ahead + 1)) {
      throw_error(ErrorCode::kNoMemory, "kv cache: found no room for token {}, expected a context of {}",
                  sequence.length() + ahead + 1, spec_.max_context);
    }
    const Slice slice{.sequence = &sequence,
                      .tokens = {&token, 1},  // which is not looked at when it is taken from the device
                      .ahead = ahead,
                      .sampled_row = launched == 0 ? -1 : 0,
                      .adapter = own_adapter_,
                      .sparse_pages = own_sparse_pages_};
    compute({&slice, 1});
    executor_->sample({&greedy, 1});
    ++launched;
  };
  size_t read = 0;
  try {
    if (!out.empty()) launch_next();
    for (; read < out.size();) {
      if (launched < out.size()) launch_next();
      const int32_t found = executor_->sampled()[0].token;
      ++read;
      if (found < 0) explain_no_token(found);
      cache_->advance(sequence, {&token, 1});
      out[read - 1] = token = found;
    }
  } catch (...) {
    for (; read < launched; ++read) executor_->sampled();
    throw;
  }
}

std::span<const float> Runtime::prefill(kv::Sequence& sequence, std::span<const int32_t> tokens) {
  // Refuse before any work, not after the first chunks.
  check_input({.sequence = &sequence, .tokens = tokens});
  std::span<const float> logits;
  while (!tokens.empty()) {
    const size_t count = std::min<size_t>(tokens.size(), spec_.max_tokens);
    const bool last = count == tokens.size();
    const StepInput input = {.sequence = &sequence,
                             .tokens = tokens.first(count),
                             .want = last ? StepInput::Want::kLast : StepInput::Want::kNone,
                             .prompt = true};
    logits = step({&input, 1});
    tokens = tokens.subspan(count);
  }
  return logits;
}

}  // namespace millrace
