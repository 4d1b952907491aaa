// Activation: what stands between the first matrices of a feed-forward block (or expert) and the last; g is
// the product with the gate's, u with the other's. Without a gate's matrix g is that one product, and u is 1.
#pragma once

namespace millrace {

// kSilu: silu(g) * u. kGelu, kGeluTanh: the same with GELU by erf or by tanh. kReluSquared: max(g, 0)^2 * u.
// kClampedSwiglu (gpt-oss): g = min(g, limit), u = clamp(u, +-limit), g * sigmoid(alpha g) * (u + 1).
enum class Activation { kSilu, kClampedSwiglu, kGelu, kGeluTanh, kReluSquared };

}  // namespace millrace
