// /v1/models: what there is, what is loaded, and loading and unloading by hand.
#include "endpoints.h"
#include "json_reply.h"
#include "ollama_answer.h"

namespace millrace::server {
namespace {

std::string_view name_of(ModelSet::State state) {
  switch (state) {
    case ModelSet::State::kUnloaded:
      return "unloaded";
    case ModelSet::State::kLoading:
      return "loading";
    case ModelSet::State::kLoaded:
      return "loaded";
    case ModelSet::State::kUnloading:
      return "unloading";
  }
  return "";
}

Json model_json(const Api& api, const ModelSet::Status& model, const std::string& id) {
  const ModelFile& file = model.file;
  Json out = {{"id", id}, {"object", "model"}, {"created", api.created()}, {"owned_by", "millrace"}};
  // The same in Anthropic's words: its clients ask at the same path.
  out["type"] = "model";
  out["display_name"] = id;
  out["created_at"] = rfc3339(static_cast<double>(api.created()));
  Json meta = {{"model", model.name},
               {"loaded", model.info.has_value()},
               {"state", std::string(name_of(model.state))},
               {"busy", model.leases},
               {"keep", model.keep},
               {"size", file.bytes},
               {"parameters", file.parameters},
               {"quantization", file.quantization},
               {"architecture", file.architecture},
               {"trained_context", file.trained_context}};
  meta["unload_in_s"] = model.unload_in_s ? Json(*model.unload_in_s) : Json(nullptr);
  meta["error"] = model.last_error.empty() ? Json(nullptr) : Json(model.last_error);
  if (model.info) {
    const ModelInfo& info = *model.info;
    out["max_model_len"] = info.context;
    meta["vocab"] = info.vocab;
    meta["device"] = info.device;
    meta["memory"] = model.memory_bytes;
  }
  out["meta"] = std::move(meta);
  return out;
}

Json model_json(Api& api, const std::string& id) { return model_json(api, api.models().status(id), id); }

}  // namespace

Reply list_models(Api& api) {
  Json list = Json::array();
  for (const ModelSet::Status& model : api.models().list()) {
    list.push_back(model_json(api, model, model.name));
    for (const std::string& alias : model.aliases) list.push_back(model_json(api, model, alias));
    for (const std::string& adapter : model.adapters) {
      list.push_back(model_json(api, model, model.name + ":" + adapter));
    }
  }
  // All of them, so there is no further page; first_id and last_id are for Anthropic's clients.
  Json reply = {{"object", "list"}, {"has_more", false}};
  reply["first_id"] = list.empty() ? Json(nullptr) : list.front()["id"];
  reply["last_id"] = list.empty() ? Json(nullptr) : list.back()["id"];
  reply["data"] = std::move(list);
  return json_reply(reply);
}

Reply get_model(Api& api, const std::string& id) { return json_reply(model_json(api, id)); }

// {"model": NAME}: answered when it is loaded, with the model as GET /v1/models/NAME has it.
Reply load_model(Api& api, const HttpRequest& request) {
  const Json body = parse_object(request.body);
  const std::string name = Fields(body).required_text("model");
  const ModelLease loaded = api.lease(name, StreamForm::kNone);
  return json_reply(model_json(api, name));
}

// {"model": NAME}: it is unloaded as soon as no answer needs it; meta.state says whether that is now.
Reply unload_model(Api& api, const HttpRequest& request) {
  const Json body = parse_object(request.body);
  const std::string name = Fields(body).required_text("model");
  api.models().unload(name);
  return json_reply(model_json(api, name));
}

}  // namespace millrace::server
