// millrace bench --clients N: many clients of one engine.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "options.h"

namespace millrace::cli {

struct ClientOptions {
  int32_t clients = 0, requests = 4, shared_prefix = 0;
  int32_t max_running = 64, step_tokens = 0, kv_tokens = 0, max_draft = 8;
  std::vector<int32_t> priorities = {0};
  std::string kv_dir, speculate = "off", draft_model;
  size_t kv_dir_mb = 8192, ram_mb = 0;
  bool no_prefix_cache = false;
  bool exact = false;  // every request has all of -p and -n
  float temperature = 0.0f, top_p = 1.0f;
  int32_t top_k = 0;
};
// --clients and what belongs to it; -p, -n and --json are bench's own.
std::shared_ptr<ClientOptions> add_client_options(Command& command);
int bench_clients(const ModelOptions& model, const ClientOptions& options, int32_t prompt, int32_t generate,
                  bool json);

}  // namespace millrace::cli
