// millrace serve: one model or several behind OpenAI's API. apps/server/ has the server; this is its command
// line.
#include "serve.h"

#include <fmt/core.h>

#include <algorithm>
#include <future>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/topology.h"
#include "confirm.h"
#include "dist/mpi_communicator.h"
#include "engine/rank_group.h"
#include "engine/rank_launcher.h"
#include "engine/rank_plan.h"
#include "millrace/engine.h"
#include "model_names.h"
#include "model_options.h"
#include "models_file.h"
#include "open_model.h"
#include "output.h"
#include "server/model_set.h"
#include "server/model_text.h"
#include "server/server.h"

namespace millrace::cli {
namespace {

constexpr const char* kServeFooter =
    "Examples:\n"
    "  millrace serve model.gguf                           # http://127.0.0.1:8080, this machine only\n"
    "  millrace serve model.gguf --host 0.0.0.0 --keys keys.txt --rate 600\n"
    "  millrace serve model.gguf --ctx 8192 --max-running 128 --ram-tier 4096 --kv-dir /var/cache/millrace\n"
    "  millrace serve model.gguf --tensor-parallel 3 --restart  # shared by three processes\n"
    "  millrace serve --models models/ --unload-after 600  # every model of a folder, loaded when asked for\n"
    "  millrace serve --models models.toml --max-models 2  # those of a file: [[model]] path = ..., ctx = "
    "...\n"
    "Then:\n"
    "  curl http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' \\\n"
    "    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Why is the sky blue?\"}], \"stream\": "
    "true}'\n"
    "  OPENAI_BASE_URL=http://127.0.0.1:8080/v1 OPENAI_API_KEY=none python my_program.py\n"
    "In a browser the address is a chat and a dashboard. /openapi.json describes every endpoint, "
    "docs/server.md\n"
    "the rest. The file of --keys has a line per key: KEY, or NAME KEY; the name appears in the log. Limits "
    "of\n"
    "its own may follow: rate=600 tokens=100000 running=8 priority=10.\n"
    "Signals: SIGTERM and SIGINT finish what is under way and end; a second one ends at once; SIGHUP reads "
    "the\n"
    "keys again and looks for new models.";

struct ServeOptions {
  EngineOptions engine = default_options();
  server::ServerOptions server;
  std::string parallel;  // "auto", or as the engine's options say
  std::string models;    // a folder or a file, instead of engine.model
  server::ModelSetOptions set;
};

void add_models_options(Command& command, ServeOptions& o) {
  const std::string group = "Several models";
  Option model = command.option("MODEL", o.engine.model, kModelHelp);
  Option models =
      command.option("--models", o.models,
                     "a folder of models, or a TOML file that names them, instead of MODEL: each is "
                     "loaded when a request asks for it (docs/server.md)");
  models.group(group);
  model.excludes(models);
  command
      .flag("--allow-pull", o.server.allow_pull,
            "clients may have models fetched from Hugging Face's hub (/api/pull)")
      .group(group);
  command
      .option("--max-models", o.set.max_models,
              "loaded at the same time: the one not used for longest is unloaded for another; 0: as fit")
      .range(0, 1 << 16)
      .show_default()
      .group(group);
  command
      .option("--unload-after", o.set.unload_after_s,
              "seconds until a model that nobody asks for is unloaded; 0: never")
      .range(0.0, 1e9)
      .show_default()
      .group(group);
  command
      .size("--models-memory", o.set.memory_bytes, size_t{1} << 20,
            "MiB of main memory for all models together; 0: what the machine has")
      .show_default()
      .group(group);
}

void refuse_idle_options(Command& command, const ServeOptions& o) {
  command.refuse_unless(
      "--share-cache", [&o] { return !o.server.keys_file.empty(); },
      "without --keys: everybody shares it then");
  const auto several = [&o] { return !o.models.empty(); };
  for (const char* name : {"--max-models", "--unload-after", "--models-memory"}) {
    command.refuse_unless(name, several, "without --models");
  }
  for (const char* name :
       {"--tensor-parallel", "--pipeline-parallel", "--context-parallel", "--data-parallel", "--parallel"}) {
    command.refuse_unless(
        name, [several] { return !several(); }, "with --models: ranks share one model");
  }
  for (const char* name : {"--adapter", "--mmproj"}) {
    command.refuse_unless(
        name, [several] { return !several(); }, "with --models, whose TOML file has those of each model");
  }
  for (const char* name : {"--model-id", "--alias"}) {
    command.refuse_unless(
        name, [several] { return !several(); }, "with --models, whose TOML file has names and aliases");
  }
}

// Ranks that nobody has started are started here, by a process that outlives them.
void choose_launcher(EngineOptions& engine) {
  if (ranks_of(engine) == 1) return;
  if (!dist::started_by_mpi()) {
    if (engine.launcher.empty()) engine.launcher = "mpirun";
    return;
  }
  if (!engine.launcher.empty() || !engine.rank_hosts.empty() || engine.restart || engine.shrink ||
      engine.front_address != EngineOptions().front_address) {
    throw_error(
        ErrorCode::kBadInput,
        "--launcher, --rank-hosts, --front-address, --restart and --shrink: found a process that mpirun "
        "has started, expected millrace serve to start mpirun");
  }
}

// Of ranks on so many hosts, where each is named as often: how many share rows. Those of one host, whose
// links are quick, with stages between hosts; all of them where each host has one, or there is but one.
int32_t ranks_that_share_rows(const std::vector<std::string>& hosts, int32_t ranks) {
  const auto on = [&](const std::string& host) { return std::count(hosts.begin(), hosts.end(), host); };
  if (hosts.empty() || std::any_of(hosts.begin(), hosts.end(),
                                   [&](const std::string& host) { return on(host) != on(hosts[0]); })) {
    return ranks;
  }
  // A stage's ranks come one after the other.
  const auto here = static_cast<size_t>(on(hosts[0]));
  for (size_t r = 0; r < hosts.size(); ++r) {
    if (hosts[r] != hosts[r / here * here]) return ranks;
  }
  return here == 1 ? ranks : static_cast<int32_t>(here);
}

// As many ranks as hosts are named (for each replica), else as this machine has memory nodes; rows where the
// model can be cut so, since that makes a single answer faster, else layers.
void choose_ranks(ServeOptions& o) {
  if (o.parallel.empty()) return;
  const std::vector<std::string> hosts = parse_rank_hosts(o.engine);
  const auto replicas = static_cast<size_t>(o.engine.data_parallel);
  const size_t count =
      hosts.empty() ? machine_topology().size() : hosts.size() / std::max<size_t>(1, replicas);
  if (!hosts.empty() && count < 2) {
    throw_error(ErrorCode::kBadInput, "--parallel auto: found {} of --rank-hosts, expected at least {}",
                hosts.size(), 2 * replicas);
  }
  const auto ranks = static_cast<int32_t>(std::min<size_t>(count, dist::kMaxTensorRanks));
  if (ranks == 1) {
    write_stderr("millrace: --parallel auto: one memory node and no --rank-hosts: one process\n");
    o.engine.rank_hosts.clear();
    return;
  }
  const io::Checkpoint checkpoint = io::Checkpoint::open(o.engine.model);
  const bool rows = can_share_rows(checkpoint, read_config(checkpoint));
  // Of the first replica.
  const std::vector<std::string> own_hosts(hosts.begin(), hosts.begin() + (hosts.empty() ? 0 : ranks));
  o.engine.tensor_parallel = rows ? ranks_that_share_rows(own_hosts, ranks) : 1;
  o.engine.pipeline_parallel = ranks / o.engine.tensor_parallel;
  std::string chosen;
  for (const auto& [name, number] :
       {std::pair{"tensor", o.engine.tensor_parallel}, std::pair{"pipeline", o.engine.pipeline_parallel}}) {
    if (number > 1) chosen += fmt::format(" --{}-parallel {}", name, number);
  }
  write_stderr(fmt::format("millrace: --parallel auto:{}\n", chosen));
}

int serve_one(ServeOptions& o) {
  server::ServerOptions& s = o.server;
  if (s.model_id.empty()) s.model_id = model_title(o.engine.model);
  o.engine.model = find_model(o.engine.model, o.engine);
  if (!server::check_model_text(o.engine.model)) {
    write_stderr(fmt::format("millrace: {}: {}\n", s.model_id, server::kNoTemplate));
  }
  choose_ranks(o);
  choose_launcher(o.engine);
  std::unique_ptr<Engine> engine = open_engine(o.engine);
  const std::string device = engine->model().device;
  server::ModelSpec spec{.name = s.model_id, .aliases = s.aliases, .engine = o.engine, .keep = true};
  o.set.defaults = checked(o.engine);
  server::ModelSet models({std::move(spec)}, o.set, server::Log(s.log_json));
  models.adopt(s.model_id, std::move(engine));
  server::serve(models, s, [&](const std::string& url) {
    write_stdout(fmt::format("millrace: {} on {}, listening on {}\n", s.model_id, device, url));
  });
  return 0;
}

// Throws what a client would be told.
void preload(server::ModelSet& models, const std::string& name) {
  std::promise<std::optional<server::ApiError>> loaded;
  models.load(name, [&](const server::ModelLease&, std::optional<server::ApiError> error) {
    loaded.set_value(std::move(error));
  });
  const std::optional<server::ApiError> error = loaded.get_future().get();
  if (error) throw_error(ErrorCode::kBadInput, "{}", error->message);
}

int serve_several(ServeOptions& o) {
  o.engine.adapters.clear();  // said to every command: they are one model's
  EngineOptions defaults = o.engine;
  defaults.model = o.models;  // in the place of those to come: an option makes sense with a model only
  o.set.defaults = checked(defaults);
  const ModelList list = read_models(o.models, o.engine);
  server::ModelSet models(list.models, o.set, server::Log(o.server.log_json));
  models.find_all = [&o] { return read_models(o.models, o.engine).models; };
  for (const std::string& name : list.preload) preload(models, name);
  server::serve(models, o.server, [&](const std::string& url) {
    write_stdout(fmt::format("millrace: {} model{} of {}, listening on {}\n", list.models.size(),
                             list.models.size() == 1 ? "" : "s", o.models, url));
  });
  return 0;
}

}  // namespace

void add_server_options(Command& command, server::ServerOptions& s) {
  std::string group = "Where it listens";
  const auto add = [&](const char* name, auto& value, const char* help) {
    return command.option(name, value, help).show_default().group(group);
  };
  add("--host", s.host, "address; 0.0.0.0: every one of this machine's");
  add("--port", s.port, "0: any free one");
  Option cert = add("--tls-cert", s.tls_cert, "PEM certificate chain: https instead of http");
  Option key = add("--tls-key", s.tls_key, "its private key");
  cert.needs(key);
  key.needs(cert);
  group = "Who may ask";
  add("--keys", s.keys_file, "file of API keys; without it everybody who can connect may ask");
  command.flag("--share-cache", s.share_cache, "with keys: let each find what others' prompts have computed")
      .group(group);
  add("--allow-host", s.allow_hosts,
      "name that clients may call this server by, beside its addresses and localhost; * for any; may be "
      "repeated");
  add("--cors", s.cors_origin, "origin whose pages may ask from a browser, or *; default: none");
  command
      .flag("--trust-proxy", s.trust_proxy,
            "a peer of a private network is a proxy: take the client's address from its X-Forwarded-For")
      .group(group);
  group = "How much each may ask (a key, or without keys an address)";
  add("--rate", s.rate_per_minute, "requests a minute, each prompt of one counted; 0: any number")
      .range(0.0, 1e9);
  add("--tokens-per-minute", s.tokens_per_minute, "of prompts and answers; 0: any number").range(0.0, 1e9);
  add("--max-requests-per-client", s.max_requests_per_client, "under way at the same time; 0: any number")
      .range(0, 1 << 20);
  add("--max-priority", s.max_priority, "highest priority a request may ask for").range(-1000000, 1000000);
  group = "What they see";
  add("--model-id", s.model_id, "the model's name in the API; default: its file's");
  add("--alias", s.aliases, "other names to accept for it; may be repeated");
  group = "Limits";
  add("--max-connections", s.max_connections, "open at the same time").range(1, 1 << 20);
  add("--max-connections-per-address", s.max_connections_per_address, "of one client; 0: half of all")
      .range(0, 1 << 20);
  command.size("--max-body", s.body_bytes, size_t{1} << 20, "MiB of a request")
      .range(1, 4096)
      .show_default()
      .group(group);
  command.size("--max-header", s.header_bytes, size_t{1} << 10, "KiB of its header")
      .range(1, 1024)
      .show_default()
      .group(group);
  add("--header-timeout", s.header_timeout_s, "seconds for a request to arrive").range(0.1, 3600.0);
  add("--idle-timeout", s.idle_timeout_s, "seconds a connection may be idle").range(0.1, 86400.0);
  add("--write-timeout", s.write_timeout_s, "seconds a client may not read, until its request is cancelled")
      .range(0.1, 3600.0);
  add("--request-timeout", s.request_timeout_s, "seconds until an answer ends where it is; 0: none")
      .range(0.0, 1e6);
  add("--request-work-timeout", s.work_timeout_s,
      "seconds that reading a request may take: its JSON, its tokens, its schema")
      .range(0.1, 3600.0);
  add("--body-memory", s.body_memory_mib,
      "MiB of bodies that are being received; large ones beyond it are answered with 503")
      .range(1, 1 << 20);
  add("--slow-queue", s.slow_queue, "large requests that may wait to be read; more are answered with 503")
      .range(1, 1 << 16);
  add("--slow-threads", s.slow_threads, "threads of low priority that read large requests").range(1, 64);
  add("--drain-timeout", s.drain_timeout_s, "seconds for what is under way after SIGTERM")
      .range(0.0, 86400.0);
  add("--store", s.stored_responses, "answers of /v1/responses kept for later requests").range(0, 1 << 20);
  add("--http-threads", s.threads, "for sockets; as many again read requests").range(1, 64);
  group = "What it says";
  command.flag("--log-json", s.log_json, "a JSON object per line").group(group);
  command.flag_off("--quiet", s.log_requests, "no line for each request").group(group);
  command.flag_off("--no-timeline", s.timeline, "/stats lists no requests").group(group);
}

void add_serve(CommandLine& line) {
  Command command = line.add("serve", "answer OpenAI's API over HTTP, with a page to chat");
  auto o = std::make_shared<ServeOptions>();
  o->engine.max_waiting = 10000;
  add_yes_option(command, "fetch the model without asking if it is not here");
  add_models_options(command, *o);
  add_device_options(command, o->engine);
  add_rank_options(command, o->engine);
  command
      .option(
          "--parallel", o->parallel,
          "auto: a rank on each of --rank-hosts, or on each memory node of this machine; rows of matrices "
          "where the model can be cut so, else layers")
      .one_of({"auto"})
      .group("Ranks that it starts");
  add_replica_option(command, o->engine);
  add_launch_options(command, o->engine, [o] { return ranks_of(o->engine) > 1 || !o->parallel.empty(); });
  add_quantize_option(command, o->engine);
  add_adapter_option(command, o->engine, /*many=*/true);
  add_image_option(command, o->engine);
  add_engine_options(command, o->engine, "Engine");
  command.option("--max-queue", o->engine.max_waiting, "requests that may wait; more are answered with 503")
      .range(0, 1 << 24)
      .show_default()
      .group("Engine");
  add_server_options(command, o->server);
  command
      .flag("--open-objects", o->set.open_objects,
            "under schemas that are not strict, objects may hold properties that nobody named")
      .group("What they see");
  command.footer(kServeFooter);
  refuse_idle_options(command, *o);
  command.check([o] {
    if (!o->parallel.empty() && ranks_of(o->engine) > 1) {
      throw UsageError("--parallel auto chooses --tensor-parallel or --pipeline-parallel itself");
    }
    if (o->models.empty() && o->engine.model.empty()) throw UsageError("expected a MODEL, or --models");
  });
  command.runs([o] { return o->models.empty() ? serve_one(*o) : serve_several(*o); });
}

}  // namespace millrace::cli
