// millrace bench --clients N: many clients of one engine.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model_options.h"

namespace millrace::cli {

struct ClientOptions {
  int32_t clients = 0, requests = 4, shared_prefix = 0;
  std::vector<int32_t> priorities = {0};
  bool exact = false;  // every request has all of -p and -n
  float temperature = 0.0f, top_p = 1.0f;
  int32_t top_k = 0;
};
// --clients and what belongs to it; -p, -n and --json are bench's own.
std::shared_ptr<ClientOptions> add_client_options(Command& command, EngineOptions& engine);
int bench_clients(const EngineOptions& given, const ClientOptions& options, int32_t prompt, int32_t generate,
                  bool energy, bool json);

}  // namespace millrace::cli
