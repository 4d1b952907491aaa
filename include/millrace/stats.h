// What an engine has done so far: counters and histograms, copied out without holding the engine up.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace millrace {

// Durations in buckets four to an octave, from 10 microseconds to three hours.
struct Histogram {
  static constexpr int kBuckets = 120;
  std::array<uint64_t, kBuckets> counts{};
  double sum_s = 0.0;

  static double upper_bound_s(int bucket);  // of what is counted in it
  uint64_t total() const;
  double mean_s() const;
  // The bound under which `fraction` of all durations lie, to a bucket's width (19%); 0 when there are none.
  double quantile_s(double fraction) const;
};

struct MemoryStats {
  size_t in_use = 0;          // handed out now
  size_t peak = 0;            // the most that ever was
  size_t reserved = 0;        // taken from the system
  double fragmentation = 0;   // of the reserved bytes not in use, the part outside the largest free piece
  uint64_t system_calls = 0;  // how often the system was asked for more
};

// A rank that this engine started (EngineOptions::launcher), as it was last heard of.
struct RankStats {
  int32_t rank = 0;
  std::string host = {};
  int64_t pid = 0;
  double heard_s = 0.0;    // ago
  double waiting_s = 0.0;  // for other ranks, in the exchange of now
  uint64_t exchanges = 0;
  std::vector<uint64_t> sent = {}, received = {};  // bytes, by rank: the links
  // Of the links, as measured when the group began: of a message of 8 bytes, and the rate of long ones. 0:
  // not yet.
  std::vector<double> latency_s = {}, bytes_per_s = {};
};

struct RankGroupStats {
  int32_t wanted = 0;  // ranks
  bool up = false;     // they are there and have loaded; else they are being started
  uint64_t restarts = 0;
  std::string last_loss = {};  // why the last group ended; empty: none has
  std::vector<RankStats> ranks = {};
};

struct EngineStats {
  double uptime_s = 0.0;
  // Requests.
  uint64_t submitted = 0, finished = 0, cancelled = 0, expired = 0, failed = 0;
  int32_t running = 0, waiting = 0, swapped = 0;  // samples, now
  // Tokens.
  uint64_t prompt_tokens = 0;     // computed or found
  uint64_t generated_tokens = 0;  // given to clients
  uint64_t computed_tokens = 0;   // rows that went through the model, drafts and recomputation included
  double generated_tok_s = 0.0;   // over the last seconds
  double computed_tok_s = 0.0;
  // Steps.
  uint64_t steps = 0;
  double mean_batch = 0.0;  // sequences per step
  double mean_rows = 0.0;   // tokens per step
  double budget_use = 0.0;  // rows over the step's token budget, mean
  double busy_s = 0.0;      // spent in the model
  double wait_s = 0.0;      // of that, waiting for a device while the engine's thread had nothing to do
  double schedule_s = 0.0;  // spent deciding
  double sample_s = 0.0;    // spent choosing tokens and making events
  // Steps in which every sequence computed one token: whole rounds of the engine, and the tokens they gave.
  double decode_s = 0.0;
  uint64_t decode_tokens = 0;
  // Blocks of the main pool, all groups together.
  int64_t blocks_total = 0, blocks_used = 0, blocks_cached = 0, blocks_free = 0;
  // Of these, those of layers with a state: each is what a sequence has to know at one place of it.
  int64_t states_used = 0, states_cached = 0, states_free = 0;
  // Blocks that left it and are kept elsewhere.
  int64_t ram_blocks = 0, disk_blocks = 0;
  uint64_t ram_bytes = 0, disk_bytes = 0;
  // Prefix cache: tokens asked for, and found in the pool, in RAM, on disk.
  uint64_t cache_queries = 0, cache_hits_pool = 0, cache_hits_ram = 0, cache_hits_disk = 0;
  uint64_t preemptions_swap = 0, preemptions_recompute = 0;
  uint64_t drafted = 0, accepted = 0;
  // Where ranks have parts of the vocabulary: rows whose token was picked by what each said of its part, and
  // rows whose logits had to be brought together for it.
  uint64_t rows_picked_by_ranks = 0, rows_gathered = 0;
  Histogram queue_time, first_token, inter_token, request_time, step_time;
  MemoryStats memory;  // buffers of the engine itself
  // Joules that each counter of the machine has counted since some moment in the past: "processors" (RAPL),
  // "gpu " and its bus id (NVML). Everything that ran is in them, the model or not. Empty where none can be
  // read.
  std::map<std::string, double> energy_joules = {};
  // The ranks that share the model, one group for each replica; empty where none were started.
  std::vector<RankGroupStats> rank_groups = {};
};

}  // namespace millrace
