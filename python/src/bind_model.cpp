// The loaded model, and the readers of its answers. What computes or waits does so without the GIL; what only
// looks keeps it, so that two threads of one reader take turns.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <string>

#include "api_call.h"
#include "base/utf8.h"
#include "errors.h"
#include "event_reader.h"
#include "find_model.h"
#include "loaded_model.h"
#include "module_parts.h"
#include "option_names.h"
#include "server/json_fields.h"

namespace nb = nanobind;

namespace millrace::python {
namespace {

using FloatRows = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using ConstFloatRows = nb::ndarray<nb::numpy, const float, nb::ndim<2>>;

// The vector itself becomes numpy's memory: nothing is copied.
FloatRows rows_of(std::vector<float> values, size_t columns) {
  auto* const kept = new std::vector<float>(std::move(values));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  return FloatRows(kept->data(), {columns == 0 ? 0 : kept->size() / columns, columns}, owner);
}

// Shared with nobody who would write: the request is over, and this is the last who holds them.
FloatRows rows_of(const std::shared_ptr<const std::vector<float>>& values, size_t columns) {
  auto* const kept = new std::shared_ptr<const std::vector<float>>(values);
  const nb::capsule owner(
      kept, [](void* p) noexcept { delete static_cast<std::shared_ptr<const std::vector<float>>*>(p); });
  return FloatRows(const_cast<float*>(values->data()), {values->size() / columns, columns}, owner);
}

nb::dict info_dict(const ModelInfo& info) {
  nb::dict d, memory, sampling;
  d["name"] = info.name;
  d["architecture"] = info.architecture;
  d["device"] = info.device;
  d["device_note"] = info.device_note;
  d["vocab_size"] = info.vocab;
  d["context"] = info.context;
  d["trained_context"] = info.trained_context;
  d["max_samples"] = info.max_samples;
  d["embedding_size"] = info.embedding_size;
  d["encoder"] = info.encoder;
  d["pooling"] = info.pooling == Pooling::kMean ? "mean" : info.pooling == Pooling::kLast ? "last" : "cls";
  d["end_tokens"] = info.end_tokens;
  d["has_tokenizer"] = info.has_tokenizer;
  d["has_chat_template"] = info.has_chat_template;
  d["quantized"] = info.quantized;
  memory["weights_mapped"] = info.memory.weights_mapped;
  memory["weights_copied"] = info.memory.weights_copied;
  memory["workspace"] = info.memory.workspace;
  memory["kv_pool"] = info.memory.kv_pool;
  memory["available"] = info.memory.available;
  d["memory"] = memory;
  sampling["temperature"] = info.sampling.temperature;
  sampling["top_p"] = info.sampling.top_p;
  sampling["min_p"] = info.sampling.min_p;
  sampling["top_k"] = info.sampling.top_k;
  sampling["repetition_penalty"] = info.sampling.repetition_penalty;
  d["sampling"] = sampling;
  return d;
}

nb::dict histogram_dict(const Histogram& histogram) {
  nb::dict d;
  d["count"] = histogram.total();
  d["mean_s"] = histogram.mean_s();
  d["p50_s"] = histogram.quantile_s(0.5);
  d["p99_s"] = histogram.quantile_s(0.99);
  return d;
}

nb::dict stats_dict(const EngineStats& s) {
  nb::dict d;
  d["uptime_s"] = s.uptime_s;
  d["submitted"] = s.submitted;
  d["finished"] = s.finished;
  d["cancelled"] = s.cancelled;
  d["expired"] = s.expired;
  d["failed"] = s.failed;
  d["running"] = s.running;
  d["waiting"] = s.waiting;
  d["swapped"] = s.swapped;
  d["prompt_tokens"] = s.prompt_tokens;
  d["generated_tokens"] = s.generated_tokens;
  d["computed_tokens"] = s.computed_tokens;
  d["generated_tok_s"] = s.generated_tok_s;
  d["computed_tok_s"] = s.computed_tok_s;
  d["steps"] = s.steps;
  d["mean_batch"] = s.mean_batch;
  d["busy_s"] = s.busy_s;
  d["blocks_total"] = s.blocks_total;
  d["blocks_used"] = s.blocks_used;
  d["blocks_cached"] = s.blocks_cached;
  d["blocks_free"] = s.blocks_free;
  d["states_used"] = s.states_used;
  d["states_cached"] = s.states_cached;
  d["states_free"] = s.states_free;
  d["ram_bytes"] = s.ram_bytes;
  d["disk_bytes"] = s.disk_bytes;
  d["cache_queries"] = s.cache_queries;
  d["cache_hits"] = s.cache_hits_pool + s.cache_hits_ram + s.cache_hits_disk;
  d["preemptions"] = s.preemptions_swap + s.preemptions_recompute;
  d["drafted"] = s.drafted;
  d["accepted"] = s.accepted;
  d["queue_time"] = histogram_dict(s.queue_time);
  d["first_token"] = histogram_dict(s.first_token);
  d["inter_token"] = histogram_dict(s.inter_token);
  d["request_time"] = histogram_dict(s.request_time);
  return d;
}

// Loading, with signals looked at and the progress told about ten times a second. `progress`: None or
// (done, total) -> None.
std::shared_ptr<LoadedModel> load(const std::string& name, const std::string& path,
                                  const std::vector<std::string>& words, bool open_objects,
                                  const nb::object& progress) {
  EngineOptions options = parse_engine_options(path, words);
  if (!options.draft_model.empty()) options.draft_model = find_model(options.draft_model, progress).path;
  using Clock = std::chrono::steady_clock;
  Clock::time_point next = Clock::now();
  options.on_load = [&](size_t done, size_t total) {
    if (done < total && Clock::now() < next) return;
    next = Clock::now() + std::chrono::milliseconds(100);
    const nb::gil_scoped_acquire gil;
    check_signals();
    if (!progress.is_none()) progress(done, total);
  };
  const nb::gil_scoped_release unlocked;
  std::unique_ptr<Engine> engine = Engine::create(options);
  return std::make_shared<LoadedModel>(name, std::move(engine), options, open_objects);
}

// response_format, regex or grammar, as JSON; for a text that is no chat.
void set_constraint(LoadedModel& model, Request& request, const std::string& json) {
  const server::Json body = server::parse_object(json);
  const server::Fields fields(body);
  server::Constraints& constraints = model.model().constraints();
  request.constraint = constraints.for_text(constraints.of_request(fields));
}

template <typename Reader>
auto wait_slice(const Reader& reader) {
  {
    const nb::gil_scoped_release unlocked;
    reader.wait();
  }
  check_signals();
}

nb::object sample_dict(EventReader::Sample& sample) {
  nb::dict d;
  d["text"] = sample.text;
  d["tokens"] = sample.tokens;
  d["logprobs"] = nb::cast(std::move(sample.logprobs));
  d["end"] = nb::cast(sample.end);
  return d;
}

// Waits for all of it: {"samples": [...], "prompt": [...] or None}
nb::dict collect(EventReader& reader) {
  EventReader::Answer answer;
  while (!reader.collect(answer)) wait_slice(reader);
  nb::dict d;
  nb::list samples;
  for (EventReader::Sample& sample : answer.samples) samples.append(sample_dict(sample));
  d["samples"] = samples;
  d["prompt"] = answer.prompt ? nb::cast(*answer.prompt) : nb::none();
  return d;
}

[[noreturn]] void throw_failure(const Event& event) {
  throw Error(event.code, event.error.empty() ? "the request failed" : event.error);
}

// The one answer to a request for numbers.
EventReader::Answer collect_numbers(EventReader& reader) {
  EventReader::Answer answer;
  while (!reader.collect(answer)) wait_slice(reader);
  const Event& end = answer.samples.at(0).end;
  if (end.kind == Event::Kind::kFailed) throw_failure(end);
  return answer;
}

FloatRows collect_embedding(EventReader& reader, size_t columns) {
  EventReader::Answer answer = collect_numbers(reader);
  Event& end = answer.samples.at(0).end;
  if (end.finish != FinishReason::kEmbedded) {
    throw Error(ErrorCode::kBusy, "the request was cancelled, or took longer than its timeout");
  }
  return rows_of(std::move(end.embedding), columns);
}

FloatRows collect_logits(EventReader& reader, size_t columns) {
  const EventReader::Answer answer = collect_numbers(reader);
  if (!answer.prompt_logits) {
    throw Error(ErrorCode::kBusy, "the request was cancelled, or took longer than its timeout");
  }
  return rows_of(answer.prompt_logits, columns);
}

void bind_loaded_model(nb::module_& m) {
  nb::class_<LoadedModel>(m, "Model")
      .def_prop_ro("name", &LoadedModel::name)
      .def("info", [](const LoadedModel& model) { return info_dict(model.info()); })
      .def("stats", [](LoadedModel& model) { return stats_dict(model.engine().stats()); })
      .def("failure", [](LoadedModel& model) { return model.engine().failure(); })
      .def("format", [](LoadedModel& model) { return std::string(model.model().format().name()); })
      .def("close", &LoadedModel::close, nb::call_guard<nb::gil_scoped_release>())
      .def("set_constraint", &set_constraint, nb::arg("request"), nb::arg("json"),
           nb::call_guard<nb::gil_scoped_release>())
      .def(
          "encode",
          [](LoadedModel& model, const std::string& text, bool add_special, bool parse_special) {
            return model.engine().tokenize(text, add_special, parse_special);
          },
          nb::arg("text"), nb::arg("add_special"), nb::arg("parse_special"),
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "decode",
          [](LoadedModel& model, const std::vector<int32_t>& tokens, bool show_special) {
            return valid_utf8(model.engine().detokenize(tokens, show_special));
          },
          nb::arg("tokens"), nb::arg("show_special"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "token_bytes",
          [](LoadedModel& model, int32_t token) {
            const std::string bytes = model.engine().token_text(token);
            return nb::bytes(bytes.data(), bytes.size());
          },
          nb::arg("token"))
      .def(
          "is_special", [](LoadedModel& model, int32_t token) { return model.engine().is_special(token); },
          nb::arg("token"))
      .def(
          "render_chat",
          [](LoadedModel& model, const std::string& variables) {
            return valid_utf8(model.engine().render_chat_json(variables));
          },
          nb::arg("variables"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "submit",
          [](const std::shared_ptr<LoadedModel>& model, const Request& request) {
            const nb::gil_scoped_release unlocked;
            return std::make_unique<EventReader>(model, request);
          },
          nb::arg("request"))
      .def(
          "call",
          [](const std::shared_ptr<LoadedModel>& model, const std::string& path, std::string body) {
            const nb::gil_scoped_release unlocked;
            return std::make_unique<ApiCall>(model, path, std::move(body));
          },
          nb::arg("path"), nb::arg("body"));
}

// What is under way: tokens as events, and calls of the server's endpoints.
void bind_readers(nb::module_& m) {
  nb::class_<EventReader>(m, "EventReader")
      .def("poll", &EventReader::poll)
      .def("wait", &wait_slice<EventReader>)
      .def("cancel", &EventReader::cancel)
      .def("collect", &collect)
      .def("collect_embedding", &collect_embedding, nb::arg("columns"))
      .def("collect_logits", &collect_logits, nb::arg("columns"))
      .def_prop_ro("done", &EventReader::done)
      .def_prop_ro("seed", &EventReader::seed)
      .def_prop_ro("fd", &EventReader::fd);

  nb::class_<ApiCall>(m, "ApiCall")
      .def("poll", &ApiCall::poll)
      .def("wait", &wait_slice<ApiCall>)
      .def("cancel", &ApiCall::cancel)
      .def_prop_ro("done", &ApiCall::done)
      .def_prop_ro("body", &ApiCall::body)
      .def_prop_ro("fd", &ApiCall::fd);
}

}  // namespace

void bind_model(nb::module_& m) {
  bind_loaded_model(m);
  bind_readers(m);
  m.def("load_model", &load, nb::arg("name"), nb::arg("path"), nb::arg("words"), nb::arg("open_objects"),
        nb::arg("progress").none());
  const auto bind_help = [&](const char* name, std::vector<OptionHelp> (*help)()) {
    m.def(name, [help] {
      nb::list all;
      for (const OptionHelp& option : help())
        all.append(nb::make_tuple(option.name, option.kind, option.list, option.help));
      return all;
    });
  };
  bind_help("engine_options", &engine_option_help);
  bind_help("server_options", &server_option_help);
  m.def(
      "find_model",
      [](const std::string& given, const nb::object& progress) {
        const FoundModel found = find_model(given, progress);
        return nb::make_tuple(found.path, found.name);
      },
      nb::arg("given"), nb::arg("progress").none());
}

}  // namespace millrace::python
