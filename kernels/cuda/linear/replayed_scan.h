// Recurrences whose state's rows are forgotten each at its own rate: Kimi's delta rule with a decay of every
// channel, and RWKV 7's. The state of a head, [key_dim][value_dim], goes from token to token; of the block
// that a step begins in, the tokens before it are replayed from the state behind the block before:
//
//   delta:  S = diag(e) S;  w = beta (v - S^T k);  S += k w^T;  o = scale S^T q      kept: k, log e, w
//   wkv7:   u = S^T a;  S = diag(e) S + b u^T + k v^T;  o = S^T q                    kept: k, b, e, v, u
//
// What is kept is what was added, so that a replayed token leaves the bits that it left when it was computed:
// a row's bits do not depend on how its prompt was cut. Keys and decays are in the blocks already
// (PrepareRows, PrepareTimeMix); w, or v and u, and states behind whole blocks are written here.
#pragma once

#include "kernels/cuda/linear/state_scan.h"

namespace millrace::cuda {

struct ReplayedScan {
  bool wkv7 = false;
  // Of row r and key head h at r * stride + h * key_dim.
  const float *q = nullptr, *k = nullptr;
  int64_t q_stride = 0, k_stride = 0;
  const float* v = nullptr;  // of head h at h * value_dim
  int64_t v_stride = 0;
  const float* decays = nullptr;           // [rows][heads][key_dim]: log e, or e of wkv7
  const float* betas = nullptr;            // [rows][heads], of the delta rule
  const float *a = nullptr, *b = nullptr;  // [rows][heads][key_dim], of wkv7
  float scale = 1.0f;
  float* out = nullptr;                                          // [rows][heads][value_dim]
  int32_t key_heads = 0, heads = 0, key_dim = 0, value_dim = 0;  // key_dim at most kMaxStateKeyDim
  bool tiled = false;  // head h has the keys of h % key_heads; else of h / (heads / key_heads)
  StateSequences sequences = {};
  StatePool pool = {};
};

// Roofline: latency of 2 or 3 passes over a head's state in registers for each token of the longest sequence;
// in decoding memory, the state read once and, once a block, written.
void launch_replayed_scan(const ReplayedScan& op, const Launch& at);

}  // namespace millrace::cuda
