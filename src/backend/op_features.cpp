#include "backend/op_features.h"

namespace millrace {
namespace {

constexpr const char* kNames[] = {"LayerNorm",
                                  "a block without a norm before it",
                                  "a norm behind a block",
                                  "a norm over all heads",
                                  "a norm without weights",
                                  "learned positions",
                                  "scaled residuals",
                                  "a soft cap of scores",
                                  "a soft cap of logits",
                                  "a bias of logits",
                                  "chunked attention",
                                  "bidirectional attention",
                                  "queries that grow with their position",
                                  "GELU",
                                  "a feed-forward layer without gate",
                                  "sigmoid routing",
                                  "a shared expert",
                                  "experts with weighed inputs",
                                  "latent attention",
                                  "gated attention",
                                  "layers with a state",
                                  "adapters",
                                  "pairs of texts",
                                  "images",

                                  "squared ReLU",
                                  "experts without a gate",
                                  "a scaled shared expert",
                                  "scaled inputs of a state",
                                  "attention beside a state",
                                  "a decay of each channel",
                                  "a token shift",
                                  "heads of several sizes",
                                  "keys and values of another layer",
                                  "a norm of values",
                                  "inputs of layers",
                                  "norms of experts",
                                  "sparse attention",
                                  "an indexer of tokens",
                                  "adapters of experts"};
static_assert(static_cast<int>(OpFeature::kCount) <= 64, "OpFeatures has a bit for each, in 64");
static_assert(sizeof(kNames) / sizeof(*kNames) == static_cast<size_t>(OpFeature::kCount));

}  // namespace

std::string OpFeatures::names() const {
  std::string names;
  for (int i = 0; i < static_cast<int>(OpFeature::kCount); ++i) {
    if ((bits_ >> i & 1) == 0) continue;
    if (!names.empty()) names += ", ";
    names += kNames[i];
  }
  return names;
}

}  // namespace millrace
