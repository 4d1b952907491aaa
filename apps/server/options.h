// What `millrace serve` can be told about the server itself; the engine has its own EngineOptions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace millrace::server {

struct ServerOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8080;                     // 0: any free one; the line at the start says which
  std::string tls_cert = {}, tls_key = {};  // PEM files; both or none

  std::string model_id = {};              // what clients call the model; empty: its file's name
  std::vector<std::string> aliases = {};  // other names that are taken for it

  std::string keys_file = {};                 // empty: no keys
  std::string cors_origin = {};               // empty: no CORS headers; * or one origin
  std::vector<std::string> allow_hosts = {};  // names this server goes by, beside its addresses; *: any
  bool trust_proxy = false;                   // a private peer says in X-Forwarded-For for whom it asks
  bool share_cache = false;                   // prefixes of one key are found by others

  // Of one client: a key, or without keys an address. 0: no limit.
  double rate_per_minute = 0;       // requests; each prompt of one counts
  double tokens_per_minute = 0;     // of prompts and answers
  int max_requests_per_client = 0;  // at the same time
  int max_priority = 0;             // a request that asks for more is refused

  size_t header_bytes = 16 << 10;
  size_t body_bytes = 16 << 20;
  size_t body_memory_mib = 256;  // of all bodies that are being received
  int max_connections = 4096;
  int max_connections_per_address = 0;  // 0: half of all
  size_t pending_bytes = 64 << 10;      // of a stream, written and not yet taken by the client
  double header_timeout_s = 10;         // from a request's first byte to its last
  double idle_timeout_s = 75;           // between requests of a connection
  double write_timeout_s = 30;          // without progress: the client is given up
  double request_timeout_s = 0;         // then an answer ends where it is; 0: none
  double work_timeout_s = 10;           // for reading a request: parsing, tokenizing, compiling its schema
  double drain_timeout_s = 30;          // after SIGTERM, for what is under way
  double keep_alive_s = 15;             // a comment in streams that are silent so long

  int threads = 2;       // for sockets; as many again for reading requests
  int slow_threads = 1;  // of low priority, for large requests
  size_t slow_queue = 64;
  size_t stored_responses = 1000;
  size_t stored_bytes = 64 << 20;

  bool allow_pull = false;  // clients may have models fetched (/api/pull)

  bool log_json = false;
  bool log_requests = true;
  bool timeline = true;
};

}  // namespace millrace::server
