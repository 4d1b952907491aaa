// Requests and events as Python sees them: plain fields.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "errors.h"
#include "millrace/request.h"
#include "module_parts.h"

namespace nb = nanobind;

namespace millrace::python {
namespace {

template <typename T>
void sampling_field(nb::class_<Request>& request, const char* name, T SamplingParams::*field) {
  request.def_prop_rw(
      name, [field](const Request& r) { return r.sampling.*field; },
      [field](Request& r, T value) { r.sampling.*field = std::move(value); }, nb::arg("value").none());
}

void set_timeout(Request& request, double seconds) {
  request.deadline =
      std::chrono::steady_clock::now() +
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

void set_pooling(Request& request, const std::string& name) {
  request.embedding = name == "mean"   ? Pooling::kMean
                      : name == "last" ? Pooling::kLast
                      : name == "cls"  ? Pooling::kFirst
                                       : Pooling::kNone;
}

nb::dict usage_dict(const Usage& usage) {
  nb::dict d;
  d["prompt_tokens"] = usage.prompt_tokens;
  d["cached_tokens"] = usage.cached_tokens;
  d["completion_tokens"] = usage.generated_tokens;
  d["drafted_tokens"] = usage.drafted_tokens;
  d["accepted_tokens"] = usage.accepted_tokens;
  d["preemptions"] = usage.preemptions;
  d["queue_s"] = usage.queue_s;
  d["first_token_s"] = usage.first_token_s;
  d["total_s"] = usage.total_s;
  return d;
}

// stop and length as OpenAI and vLLM have them; what else ends a request under its own name.
std::string finish_name(const Event& event) {
  switch (event.finish) {
    case FinishReason::kEndToken:
    case FinishReason::kStopString:
      return "stop";
    case FinishReason::kMaxTokens:
    case FinishReason::kContext:
      return "length";
    default:
      return std::string(to_string(event.finish));
  }
}

}  // namespace

void bind_requests(nb::module_& m) {
  nb::class_<Request> request(m, "Request");
  request.def(nb::init<>())
      .def_rw("tokens", &Request::tokens)
      .def_rw("text", &Request::text)
      .def_rw("prompt_logprobs", &Request::prompt_logprobs, nb::arg("value").none())
      .def_rw("prompt_logits", &Request::prompt_logits)
      .def_rw("samples", &Request::samples)
      .def_rw("max_tokens", &Request::max_tokens)
      .def_rw("stop", &Request::stop)
      .def_rw("stop_tokens", &Request::stop_tokens)
      .def_rw("ignore_end", &Request::ignore_end)
      .def_rw("show_special", &Request::show_special)
      .def_rw("priority", &Request::priority)
      .def_rw("cache_salt", &Request::cache_salt)
      .def_rw("attention", &Request::attention)
      .def_rw("attention_budget", &Request::attention_budget)
      .def("set_timeout", &set_timeout)
      .def("set_pooling", &set_pooling);
  sampling_field(request, "temperature", &SamplingParams::temperature);
  sampling_field(request, "top_k", &SamplingParams::top_k);
  sampling_field(request, "top_p", &SamplingParams::top_p);
  sampling_field(request, "min_p", &SamplingParams::min_p);
  sampling_field(request, "repetition_penalty", &SamplingParams::repetition_penalty);
  sampling_field(request, "presence_penalty", &SamplingParams::presence_penalty);
  sampling_field(request, "frequency_penalty", &SamplingParams::frequency_penalty);
  sampling_field(request, "logit_bias", &SamplingParams::logit_bias);
  sampling_field(request, "seed", &SamplingParams::seed);
  sampling_field(request, "logprobs", &SamplingParams::logprobs);

  nb::class_<TokenLogprob>(m, "TokenLogprob")
      .def_ro("token", &TokenLogprob::token)
      .def_ro("logprob", &TokenLogprob::logprob)
      .def_ro("top", &TokenLogprob::top);

  nb::class_<Event>(m, "Event")
      .def_prop_ro("is_token", [](const Event& e) { return e.kind == Event::Kind::kToken; })
      .def_prop_ro("failed", [](const Event& e) { return e.kind == Event::Kind::kFailed; })
      .def_ro("sample", &Event::sample)
      .def_ro("token", &Event::token)
      .def_ro("text", &Event::text)
      .def_ro("logprob", &Event::logprob)
      .def_ro("top", &Event::top)
      .def_prop_ro("finish", &finish_name)
      .def_prop_ro("stopped_by_text", [](const Event& e) { return e.finish == FinishReason::kStopString; })
      .def_prop_ro("usage", [](const Event& e) { return usage_dict(e.usage); })
      .def_prop_ro("code", [](const Event& e) { return code_name(e.code); })
      .def_ro("error", &Event::error);
}

}  // namespace millrace::python
