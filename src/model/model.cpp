#include "model/model.h"

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "base/read_before.h"
#include "io/hf_directory.h"
#include "model/architecture.h"
#include "model/feature_recorder.h"
#include "model/quantized_weights/quantized_weight.h"
#include "model/weight_slice.h"
#include "model/weight_source.h"
#include "quant/recode.h"

namespace millrace {
namespace {

// Where a weight of layer l, or outside the layers for -1, stands. What only embed() reads is the embedding;
// of a model whose embedding is multiplied too it is all the output's.
WeightPlace place_of(int l, const WeightSpec& spec, const ModelConfig& c, bool multiplied) {
  using enum WeightPlace::Part;
  if (l >= 0) return {spec.experts && c.experts > 0 ? kExperts : kLayer, l};
  const auto is = [&](std::initializer_list<OuterMember> members) {
    return std::find(members.begin(), members.end(), spec.outer) != members.end();
  };
  using W = ModelWeights;
  const bool read =
      spec.role == "token_embd.weight" ||
      is({&W::positions, &W::token_types, &W::embedding_norm, &W::embedding_norm_bias, &W::layer_table});
  return {read && !multiplied ? kEmbedding : kOutput, -1};
}

// Hands every weight of a model, in file-independent order, to `visit`: GGUF name, what the architecture says
// of it, view, use, where it stands, and where it goes. Matrices that every token of a prompt is multiplied
// by come as kDequantized: settled() says what they are loaded as. With `shares` views are a rank's part, and
// an embedding that serves as output matrix too comes twice: whole where it is looked up, in part where it is
// multiplied.
template <class Visit>
void for_each_weight(WeightSource& source, const ModelConfig& c, const dist::Shares* shares, ModelWeights& w,
                     const Visit& visit) {
  const Architecture& architecture = architecture_of(c);
  if (shares != nullptr && shares->whole_experts()) source.gather_only(shares->experts(c.experts));
  const std::vector<WeightSpec>& outside = source.specs(-1);
  const WeightSpec &embedding = outside[0], &norm = outside[1], &output = outside[2];
  const bool tied = !source.has(-1, output.role);
  const bool multiplied = tied && !c.encoder;
  const auto take = [&](int l, const WeightSpec& spec, WeightUse use, WeightPtr& to) {
    std::optional<TensorView> view = spec.presence == Presence::kRequired
                                         ? source.require(l, spec.role, spec.shape)
                                         : source.find(l, spec.role, spec.shape);
    if (!view) return;
    if (shares != nullptr && shares->ranks() > 1) *view = slice_weight(*view, spec.role, c, *shares);
    visit(l < 0 ? std::string(spec.role) : fmt::format("blk.{}.{}", l, spec.role), spec, *view, use,
          place_of(l, spec, c, multiplied), to);
  };
  const dist::Range layers = shares == nullptr ? dist::Range{0, c.layers} : shares->layers(c.layers);
  const bool first = layers.begin == 0, last = layers.end == c.layers;
  if (first) {
    take(-1, embedding, multiplied && shares == nullptr ? WeightUse::kEmbedding : embedding.use,
         w.token_embedding);
  }
  if (multiplied && shares != nullptr && last) {
    const TensorView view = source.require(-1, embedding.role, embedding.shape);
    visit(std::string(embedding.role), embedding, slice_weight(view, output.role, c, *shares), output.use,
          WeightPlace{}, w.output);
  }
  take(-1, norm, norm.use, w.output_norm);
  if (last) take(-1, output, output.use, w.output);
  for (size_t i = 3; i < outside.size(); ++i) {
    WeightPtr nowhere;
    take(-1, outside[i], outside[i].use, outside[i].on_host ? nowhere : w.*outside[i].outer);
  }
  for (int l = 0; l < c.layers; ++l) {
    LayerWeights& layer = *w.layers.emplace_back(architecture.new_layer());
    if (l < layers.begin || l >= layers.end) continue;
    for (const WeightSpec& spec : source.specs(l)) take(l, spec, spec.use, layer.*spec.to);
  }
}

void run_model(Executor& executor, const Architecture& architecture, const ModelWeights& weights,
               const ModelConfig& config, dist::Range layers) {
  if (layers.begin == 0) executor.embed(architecture.embedding(weights, config));
  if (config.layer_input > 0) executor.layer_inputs(architecture.layer_inputs(weights, config));
  for (auto l = static_cast<int>(layers.begin); l < layers.end; ++l) {
    architecture.layer(executor, *weights.layers[static_cast<size_t>(l)], config, l);
  }
  if (layers.end == config.layers && !config.encoder) {
    executor.norm_logits(architecture.logits(weights, config));
  }
}

}  // namespace

void refuse_unread_biases(const io::Checkpoint& checkpoint, const ModelConfig& config) {
  constexpr std::string_view kBias = ".bias";
  WeightSource source(checkpoint, config, /*gather=*/false);
  for (int l = -1; l < config.layers; ++l) {
    const std::set<std::string> names = source.all_names(l);
    for (const std::string& name : names) {
      if (!name.ends_with(".weight")) continue;
      const std::string bias = name.substr(0, name.size() - 7) + std::string(kBias);
      if (names.contains(bias) || checkpoint.find_tensor(bias) == nullptr) continue;
      throw_error(ErrorCode::kUnsupported, "{}: tensor {}: found a bias, expected none for architecture {}",
                  checkpoint.path(), bias, config.architecture);
    }
  }
}

OpFeatures needed_features(const io::Checkpoint& checkpoint, const ModelConfig& config) {
  WeightSource source(checkpoint, config, /*gather=*/false);
  ModelWeights named;
  for_each_weight(source, config, nullptr, named,
                  [](const std::string&, const WeightSpec&, const TensorView&, WeightUse, const WeightPlace&,
                     WeightPtr& to) { to = std::make_unique<Weight>(); });
  FeatureRecorder recorder;
  run_model(recorder, architecture_of(config), named, config, {0, config.layers});
  return recorder.features();
}

namespace {

// Refuses, before anything is loaded, a model with operations that the device does not do.
void check_features(const io::Checkpoint& checkpoint, const ModelConfig& config, const Backend& backend,
                    const OpFeatures& besides) {
  refuse_unread_biases(checkpoint, config);
  const OpFeatures missing = (needed_features(checkpoint, config) | besides) & backend.lacks();
  if (!missing.any()) return;
  if (backend.shares() != nullptr) {
    bool in_stages = true;  // do they do it?
    for (const OpFeature of_all_layers :
         {OpFeature::kHeadSizes, OpFeature::kSharedKeys, OpFeature::kLayerInputs, OpFeature::kExpertNorms}) {
      in_stages = in_stages && !missing.has(of_all_layers);
    }
    throw_error(ErrorCode::kUnsupported, "{}: {} needs what ranks with the device {} do not do yet: {}; {}",
                checkpoint.path(), config.architecture, backend.name(), missing.names(),
                backend.name() != "cpu" ? "use --device cpu"
                : in_stages
                    ? "expected one process, or --pipeline-parallel where layers do not read one another"
                    : "expected one process");
  }
  throw_error(ErrorCode::kUnsupported, "{}: {} needs what {} does not do yet: {}; use --device cpu",
              checkpoint.path(), config.architecture, backend.name(), missing.names());
}

// What a weight is loaded as: in FP8 too, or dequantized where that is done in this model, if the backend
// does it to this one.
WeightUse settled(WeightUse use, const TensorView& view, const WeightPlace& place, const Backend& backend,
                  bool dequantizes) {
  if (use == WeightUse::kDequantized && backend.multiplies_fp8(view)) return WeightUse::kFp8;
  if (use != WeightUse::kDequantized || (dequantizes && backend.placed_dequantized_bytes(view, place) > 0)) {
    return use;
  }
  return WeightUse::kMatrix;
}

size_t stored_bytes(const TensorView& view) {
  return view.bytes() + (view.type == DType::kMXFP4Split ? static_cast<size_t>(view.elements() / 32) : 0);
}

// Bytes of `view` that one token reads.
size_t bytes_read(const WeightSpec& spec, const TensorView& view, WeightUse use, const ModelConfig& config) {
  const size_t bytes = stored_bytes(view);
  if (use == WeightUse::kLookup) return bytes / static_cast<size_t>(view.rows());
  if (spec.experts && config.experts > 0) {
    return bytes / static_cast<size_t>(config.experts) * static_cast<size_t>(config.experts_per_token);
  }
  return bytes;
}

// The type a weight is to have in memory: its own unless it is a matrix and `quantize` says otherwise.
DType loaded_type(const TypeChoice& quantize, const std::string& name, const TensorView& view, WeightUse use,
                  bool tied) {
  return !quantize || use == WeightUse::kVector ? view.type : quantize(name, view, tied);
}

// `view` as `type` in memory of its own, which is added to `owned`.
TensorView recoded(const TensorView& view, DType type, Backend& backend, const quant::MatrixInputs* inputs,
                   quant::FeedbackCache& cache, std::vector<std::unique_ptr<std::byte[]>>& owned) {
  TensorView out = view;
  out.type = type;
  out.scales = {};
  out.row_stride_bytes = static_cast<int64_t>(bytes_of(type, view.cols()));
  owned.push_back(std::unique_ptr<std::byte[]>(new std::byte[out.bytes()]));
  std::byte* const data = owned.back().get();
  out.data = data;
  const float* importance = inputs == nullptr ? nullptr : inputs->squares.data();
  const quant::ErrorFeedback* feedback =
      inputs == nullptr ? nullptr
                        : cache.of(type, view.cols(), *inputs,
                                   [&](int64_t count, const auto& body) { backend.parallel(count, body); });
  const int64_t chunk = quant::recode_chunk(view.cols()), rows = view.rows();
  backend.parallel((rows + chunk - 1) / chunk, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * chunk, last = std::min(end * chunk, rows);
    quant::recode_rows(view, first, last - first, type, importance, {}, data + first * out.row_stride_bytes,
                       feedback);
  });
  return out;
}

// Where the weights lie that will be quantized, in the order they are loaded; nothing for the others.
std::vector<ReadBefore::Range> ranges_to_quantize(const io::Checkpoint& checkpoint, const ModelConfig& config,
                                                  const TypeChoice& quantize, bool tied) {
  WeightSource source(checkpoint, config, /*gather=*/false);
  ModelWeights none;
  std::vector<ReadBefore::Range> ranges;
  for_each_weight(source, config, nullptr, none,
                  [&](const std::string& name, const WeightSpec&, const TensorView& view, WeightUse use,
                      const WeightPlace&, WeightPtr&) {
                    const bool read = view.data != nullptr && view.rows() > 0 &&
                                      loaded_type(quantize, name, view, use, tied) != view.type;
                    const size_t bytes =
                        read ? static_cast<size_t>((view.rows() - 1) * view.row_stride_bytes) +
                                   bytes_of(view.type, view.cols())
                             : 0;
                    ranges.push_back({view.data, bytes});
                  });
  return ranges;
}

// "gptq, 4 bits: 12 matrices read as q4_0, 2 as f32 (no narrower type holds them; ...)"
std::string words_of(const WeightSource::Unpacked& unpacked) {
  std::string out, before;
  bool wide = false;
  for (const auto& [from, count] : unpacked) {
    const auto& [scheme, type] = from;
    out += scheme == before ? fmt::format(", {} as {}", count, info(type).name)
                            : fmt::format("{}{}: {} matrices read as {}", out.empty() ? "" : "; ", scheme,
                                          count, info(type).name);
    wide = wide || info(type).block_elements == 1;
    before = scheme;
  }
  if (wide)
    out += " (floats where no narrower type has every value; millrace quantize writes a smaller file)";
  return out;
}

// No output matrix means it is the embedding; a file that says otherwise is missing a tensor.
void check_output(const io::Checkpoint& checkpoint, const Architecture& architecture) {
  if (!has_tied_output(checkpoint) || checkpoint.gguf || architecture.hf_names().output.empty()) return;
  const auto tie = checkpoint.hf->config.find("tie_word_embeddings");
  if (tie != checkpoint.hf->config.end() && *tie == false) {
    throw_error(ErrorCode::kBadInput,
                "{}: tensor {}: found nothing, expected it because config.json says "
                "tie_word_embeddings false",
                checkpoint.path(), architecture.hf_names().output);
  }
}

}  // namespace

bool has_tied_output(const io::Checkpoint& checkpoint) {
  if (checkpoint.gguf) return !has_weight(checkpoint, "output.weight");
  const HfNames names = find_architecture(checkpoint).hf_names();
  return !has_weight(checkpoint, std::string(names.output)) || has_output_alone(checkpoint, names);
}

TypeChoice type_choice(const quant::TypeRequest& request) {
  return [request](const std::string& name, const TensorView& view, bool tied) {
    const DType type = quant::target_type(request, name, view, tied);
    // Written anew only where the numbers change; routers stay as they are, like everything small.
    const bool same = type == DType::kMXFP4 && view.type == DType::kMXFP4Split;
    return same || quant::part_of(name, view, tied) == quant::Part::kSmall ? view.type : type;
  };
}

void visit_weights(WeightSource& source, const ModelConfig& config, const WeightVisitor& visit) {
  ModelWeights none;
  for_each_weight(source, config, nullptr, none,
                  [&](const std::string& name, const WeightSpec& spec, const TensorView& view, WeightUse,
                      const WeightPlace&, WeightPtr&) { visit(name, spec, view); });
}

std::unique_ptr<Model> Model::load(const io::Checkpoint& checkpoint, Backend& backend,
                                   const LoadProgress& progress, const TypeChoice& quantize,
                                   const InputsOf& inputs, const OpFeatures& besides) {
  std::unique_ptr<Model> model(new Model);
  model->architecture_ = &find_architecture(checkpoint);
  model->config_ = read_config(checkpoint);
  model->layers_ = backend.shares() == nullptr ? dist::Range{0, model->config_.layers}
                                               : backend.shares()->layers(model->config_.layers);
  check_output(checkpoint, *model->architecture_);
  check_features(checkpoint, model->config_, backend, besides);
  WeightSource source(checkpoint, model->config_, /*gather=*/true,
                      [&](int64_t count, const auto& body) { backend.parallel(count, body); });
  const size_t total = checkpoint.mapped_bytes();
  size_t done = 0;
  const bool tied = has_tied_output(checkpoint);
  quant::FeedbackCache feedback;
  const auto keep = [&](std::vector<std::unique_ptr<std::byte[]>> memory) {
    for (auto& piece : memory) model->gathered_.push_back(std::move(piece));
  };
  // What is quantized is read to its end, once: the disk goes on while the processors encode.
  std::optional<ReadBefore> before;
  if (quantize) before.emplace(ranges_to_quantize(checkpoint, model->config_, quantize, tied));
  const bool dequantizes = plan_weights(checkpoint, model->config_, backend, quantize).dequantized > 0;
  size_t index = 0;
  for_each_weight(source, model->config_, backend.shares(), model->weights_,
                  [&](const std::string& name, const WeightSpec& spec, const TensorView& stored,
                      WeightUse use, const WeightPlace& place, WeightPtr& to) {
                    if (spec.on_host) return;
                    const DType type = loaded_type(quantize, name, stored, use, tied);
                    if (before) before->begin(index++);
                    auto gathered = source.take_gathered();
                    TensorView view = stored;
                    if (type != stored.type) {
                      std::vector<std::unique_ptr<std::byte[]>> memory;
                      view =
                          recoded(stored, type, backend, inputs ? inputs(name) : nullptr, feedback, memory);
                      gathered = std::move(memory);
                    }
                    to = backend.load_placed(view, settled(use, view, place, backend, dequantizes), place);
                    if (!to->copied) keep(std::move(gathered));
                    const bool own_name = !checkpoint.gguf || spec.heads_of.has_value();
                    model->stored_[to.get()] = {view.type, stored_bytes(view), own_name ? name : stored.name};
                    model->bytes_per_token_ += bytes_read(spec, view, use, model->config_);
                    done += stored.bytes();
                    if (progress) progress(std::min(done, total), total);
                  });
  if (progress) progress(total, total);
  model->unpacked_ = words_of(source.unpacked());
  return model;
}

namespace {

// A float32 matrix in memory, or one of each expert.
TensorView float_view(const std::vector<float>& values, int64_t experts, int64_t rows, int64_t cols,
                      const std::string& name) {
  TensorView view;
  view.name = name;
  view.type = DType::kF32;
  view.rank = experts > 0 ? 3 : 2;
  view.shape = {rows, cols, 1, 1};
  if (experts > 0) view.shape = {experts, rows, cols, 1};
  view.row_stride_bytes = static_cast<int64_t>(sizeof(float)) * cols;
  view.data = reinterpret_cast<const std::byte*>(values.data());
  return view;
}

}  // namespace

const Weight* Model::find_weight(int layer, std::string_view role) const {
  if (layer < 0) return architecture_->logits(weights_, config_).output.weight;
  for (const WeightSpec& spec : architecture_->layer_weights(config_, layer)) {
    if (spec.role == role) return ((*weights_.layers[static_cast<size_t>(layer)]).*spec.to).get();
  }
  return nullptr;
}

void Model::add_adapters(std::vector<Adapter> adapters, Backend& backend) {
  FeatureRecorder recorder;  // knows the products that executors update
  run_model(recorder, *architecture_, weights_, config_, layers_);
  adapters_ = std::move(adapters);
  adapter_table_ = AdapterTable(static_cast<int32_t>(adapters_.size()));
  const auto load = [&](const AdapterUpdate& of, const std::vector<float>& values, int64_t rows, int64_t cols,
                        bool cut) {
    TensorView view = float_view(values, of.experts, rows, cols, of.name);
    // A rank has those rows of B that it has of the matrix, and all of A.
    if (cut && backend.shares() != nullptr && backend.shares()->ranks() > 1) {
      view = slice_weight(view, of.role, config_, *backend.shares());
    }
    adapter_weights_.push_back(backend.load_weight(view, WeightUse::kMatrix));
    return adapter_weights_.back().get();
  };
  for (size_t i = 0; i < adapters_.size(); ++i) {
    for (const AdapterUpdate& update : adapters_[i].updates) {
      const bool elsewhere = update.layer < 0 ? layers_.end < config_.layers
                                              : update.layer < layers_.begin || update.layer >= layers_.end;
      if (elsewhere) continue;
      const Weight* weight = find_weight(update.layer, update.role);
      if (weight == nullptr || !recorder.adaptable(weight)) {
        throw_error(ErrorCode::kUnsupported, "{}: adapter of {}: this {} model {}", adapters_[i].path,
                    update.name, config_.architecture,
                    weight == nullptr ? "has no such matrix" : "has a product there that is not adapted yet");
      }
      adapter_table_.set(static_cast<int32_t>(i), *weight,
                         {.a = load(update, update.a, update.rank, update.in, false),
                          .b = load(update, update.b, update.out, update.rank, true)});
    }
  }
}

void Model::forward(Executor& executor, const Batch& batch, const std::function<void()>& receive) const {
  Batch adapted = batch;
  if (!adapters_.empty()) adapted.adapters = &adapter_table_;
  executor.begin(adapted);
  if (receive) receive();
  run_model(executor, *architecture_, weights_, config_, layers_);
  if (layers_.end < config_.layers) executor.start();
}

void Model::read_hidden(Executor& executor, int32_t row, std::span<float> to) const {
  executor.read_hidden(architecture_->logits(weights_, config_).norm, row, to);
}

bool keeps_dequantized(size_t dequantized, size_t repacked, size_t memory) {
  constexpr size_t kPart = 8;
  return repacked < memory && dequantized <= (memory - repacked) / kPart;
}

WeightBytes plan_weights(const io::Checkpoint& checkpoint, const ModelConfig& config, const Backend& backend,
                         const TypeChoice& quantize) {
  WeightSource source(checkpoint, config, /*gather=*/false);
  ModelWeights none;
  WeightBytes plan;
  size_t gathered = 0, held_before = 0;
  WeightSource::Unpacked unpacked_before;
  const bool tied = has_tied_output(checkpoint);
  for_each_weight(source, config, backend.shares(), none,
                  [&](const std::string& name, const WeightSpec& spec, const TensorView& stored,
                      WeightUse use, const WeightPlace& place, WeightPtr&) {
                    const size_t copied = source.gathered_bytes() - gathered;  // of this weight
                    gathered += copied;
                    if (spec.on_host) return;
                    TensorView view = stored;
                    view.type = loaded_type(quantize, name, stored, use, tied);
                    const bool same = view.type == stored.type;
                    if (!same) view.row_stride_bytes = static_cast<int64_t>(bytes_of(view.type, view.cols()));
                    if (use == WeightUse::kDequantized) {
                      plan.dequantized += backend.placed_dequantized_bytes(view, place);
                    }
                    use = settled(use, view, place, backend, false);
                    const size_t held = backend.placed_bytes(view, use, held_before, place);
                    held_before += held;
                    // What is unpacked is read once, and then lies in memory of its own.
                    const bool unpacks = source.unpacked() != unpacked_before;
                    unpacked_before = source.unpacked();
                    if (same && !unpacks) plan.mapped += view.bytes();
                    // What was gathered or quantized is let go where the backend has a copy of it.
                    const bool two = backend.own_memory() && backend.in_machine_memory(place);
                    const bool copied_matrix =
                        use == WeightUse::kMatrix || (use == WeightUse::kFp8 && backend.own_memory());
                    const bool let_go = held > 0 && copied_matrix && !two;
                    const size_t kept = let_go ? 0 : same ? copied : view.bytes();
                    plan.repacked += held + (two ? 0 : kept);
                    if (two) plan.on_machine += kept;
                  });
  if (checkpoint.hf) plan.repacked += checkpoint.hf->weights.copied_bytes();
  if (!keeps_dequantized(plan.dequantized, plan.repacked, backend.own_memory().value_or(0)))
    plan.dequantized = 0;
  return plan;
}

WeightSizes weight_sizes(const io::Checkpoint& checkpoint, const ModelConfig& config, const Backend& backend,
                         const TypeChoice& quantize) {
  WeightSource source(checkpoint, config, /*gather=*/false);
  ModelWeights none;
  WeightSizes sizes;
  sizes.layers.resize(static_cast<size_t>(config.layers));
  size_t before = 0;
  const bool tied = has_tied_output(checkpoint);
  for_each_weight(source, config, nullptr, none,
                  [&](const std::string& name, const WeightSpec&, const TensorView& stored, WeightUse use,
                      const WeightPlace& place, WeightPtr&) {
                    TensorView view = stored;
                    view.type = loaded_type(quantize, name, stored, use, tied);
                    if (view.type != stored.type) {
                      view.row_stride_bytes = static_cast<int64_t>(bytes_of(view.type, view.cols()));
                    }
                    use = settled(use, view, place, backend, false);
                    const size_t held = backend.weight_bytes(view, use, before);
                    before += held;
                    // A device without memory of its own reads the file's.
                    const size_t bytes = backend.own_memory() ? held : held + view.bytes();
                    using enum WeightPlace::Part;
                    switch (place.part) {
                      case kEmbedding:
                        sizes.embedding += bytes;
                        break;
                      case kOutput:
                        sizes.output += bytes;
                        break;
                      case kLayer:
                        sizes.layers[static_cast<size_t>(place.layer)].dense += bytes;
                        break;
                      case kExperts:
                        sizes.layers[static_cast<size_t>(place.layer)].experts += bytes;
                        break;
                    }
                  });
  return sizes;
}

}  // namespace millrace
