// A weight of a mixed device: on the first, on the second, or, experts, in part on each; and the operations
// of backend.h with one device's weights in the place of these.
#pragma once

#include <memory>
#include <vector>

#include "backend/backend.h"

namespace millrace::mixed {

enum class Side { kFirst, kSecond };

struct MixedWeight final : Weight {
  WeightPtr first, second;                             // one of them is absent unless experts are shared out
  int32_t layer = -1;                                  // of experts
  std::vector<std::unique_ptr<std::byte[]>> gathered;  // what these do not have a copy of
};

inline const MixedWeight& own(const Weight& weight) { return static_cast<const MixedWeight&>(weight); }

// nullptr of nullptr, and of what that device has not.
inline const Weight* part_of(const Weight* weight, Side side) {
  if (weight == nullptr) return nullptr;
  return side == Side::kFirst ? own(*weight).first.get() : own(*weight).second.get();
}
// Which device has it; of weights that both have, the first.
inline Side side_of(const Weight& weight) { return own(weight).first ? Side::kFirst : Side::kSecond; }

Norm on(Norm op, Side side);
Linear on(Linear op, Side side);
Embed on(Embed op, Side side);
NormQkv on(NormQkv op, Side side);
NormLatentQkv on(NormLatentQkv op, Side side);
Attend on(Attend op, Side side);
NormMix on(NormMix op, Side side);
StateMix on(StateMix op, Side side);
Projection on(Projection op, Side side);
Ffn on(Ffn op, Side side);
Route on(Route op, Side side);
Experts on(Experts op, Side side);
Logits on(Logits op, Side side);

// Experts `ids` (ascending) of a view [experts, ..]: a part of the same memory where they follow one another,
// else gathered into memory that is added to `owned`. Throws Error{kUnsupported} for a view with a grid of
// scales beside it that would have to be gathered.
TensorView experts_view(const TensorView& view, const std::vector<int32_t>& ids,
                        std::vector<std::unique_ptr<std::byte[]>>& owned);
// The shape and type of that view alone, to plan with.
TensorView experts_shape(const TensorView& view, int64_t count);

}  // namespace millrace::mixed
