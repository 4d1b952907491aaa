// Plan: who holds what of a model and what ranks say to one another, as plain data: rows of every weight,
// heads, bytes, and the bytes of a step by formula. It is made without a device, and what runs follows the
// same Shares; a test compares the formula with what went over the links, to the byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "dist/communicator.h"
#include "dist/shares.h"

namespace millrace::dist {

// What of a model decides the exchanges.
struct PlanShape {
  int64_t hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, vocab = 0;
  // Activations between up and down that a layer exchanges: `cols` of them for each of `rows_per_token`. Of
  // whole experts, of which there are so many: their outputs.
  struct Inner {
    int64_t cols = 0, rows_per_token = 1, whole_experts = 0;
  };
  struct Layer {
    std::vector<Inner> inner;  // dense: one; experts: theirs (k rows) and the shared one's
    int64_t residuals = 2;     // exchanges of the residual stream: behind attention, behind down
    bool attends = true;
  };
  std::vector<Layer> layers;
  bool whole_attention = false;  // every rank has all heads
};

// Seconds of a decoded token: computing, latencies, and bytes on their way.
struct TokenTime {
  double computing_s = 0, latency_s = 0, moving_s = 0;
  double all() const { return computing_s + latency_s + moving_s; }
};

struct Plan {
  struct Part {  // rows [begin, end) of `of` of a weight, of every expert where there are experts; or experts
    std::string weight;
    int64_t begin = 0, end = 0, of = 0;
    size_t bytes = 0, read_bytes = 0;  // read: for a token, which some experts compute
  };
  struct Rank {
    std::vector<Part> parts;
    size_t weight_bytes = 0;
    Range query_heads, kv_heads;
    Range experts;  // where ranks have whole ones
    size_t kv_bytes_per_token = 0;
  };
  PlanShape shape;
  std::vector<double> speeds;
  std::vector<Rank> ranks;
  size_t read_bytes = 0;  // of the whole model, for a token

  // Bytes of activations that a rank receives in a step of so many rows, `logit_rows` of which want logits:
  // behind the last attention only these are computed. Without the logits themselves, which rank 0 alone
  // gets. What goes to whole experts is up to the router: here every expert is chosen as often as any other.
  uint64_t received(int rank, int64_t rows, int64_t logit_rows) const;
  uint64_t sent(int rank, int64_t rows, int64_t logit_rows) const;
  uint64_t logits_received(int64_t logit_rows) const;  // by rank 0
  int64_t exchanges_per_step() const;                  // each costs a latency

  // What a decoded token takes, where one rank by itself takes alone_s for it: its weights decide that, and
  // who has most of a matrix is waited for. Nothing is computed while something moves. One rate for all: a
  // rank's line.
  TokenTime token_time(double alone_s, const LinkSpeed& link) const;

 private:
  uint64_t exchanged(int64_t rows, int64_t logit_rows, int rank, bool sends) const;
};

}  // namespace millrace::dist
