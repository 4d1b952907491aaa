// Gradients of linear attention over ragged sequences: the C API's (millrace/kernels/linear_attention.h),
// whose arguments were checked. All three rules are one recurrence, in double:
//
//   u = S^T a;  S' = diag(e) S + b u^T + k v^T;  o = S'^T q
//
// the gated delta rule with e = exp(g), a = e k, b = -beta k and beta v in place of v; the selective scan
// with e = exp(dt a) and dt x in place of v, and no u; wkv7 as it is. Backwards, with dS' the gradient of S':
//
//   dS' += q do^T;  dq = S' do;  dk = dS' v;  dv = dS'^T k;  du = dS'^T b;  db = dS' u;  da = S du
//   de = rows' sums of dS' * S;  dS = diag(e) dS' + a du^T
//
// A state is kept for each 16 tokens and the 16 of a chunk are computed again from it: 7 to 9 operations on a
// state for each token, bound by arithmetic where a chunk's states lie in the second-level cache.
#pragma once

#include "kernels/cpu/context.h"
#include "millrace/kernels/linear_attention.h"

namespace millrace::cpu {

struct LinearBackwardSizes {
  int32_t sequences, heads, key_dim, value_dim;
  int64_t longest;  // tokens of a sequence
};
size_t linear_backward_workspace_bytes(const LinearBackwardSizes& sizes, int threads);

void gated_delta_backward(const Context& ctx, const mr_gated_delta_backward_args& args, void* workspace);
void selective_scan_backward(const Context& ctx, const mr_selective_scan_backward_args& args,
                             void* workspace);
void wkv7_backward(const Context& ctx, const mr_wkv7_backward_args& args, void* workspace);

}  // namespace millrace::cpu
