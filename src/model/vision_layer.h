// The encoder layer that vision towers are made of: LayerNorms with biases, attention of every patch to every
// patch, a feed-forward layer without a gate. Towers differ in how patches are embedded, by what they are
// rotated, and in what becomes of them behind the last layer.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "backend/backend.h"
#include "io/gguf.h"

namespace millrace {

struct VisionLayer {
  WeightPtr norm1, norm1_bias, norm2, norm2_bias;
  WeightPtr q, k, v, out, up, down, q_bias, k_bias, v_bias, out_bias, up_bias, down_bias;
};

struct VisionLayerShape {
  int32_t hidden = 0, heads = 0, ffn = 0, layers = 0;
  float eps = 1e-6f;
  Activation activation = Activation::kGeluTanh;
};

// Of an executor that runs them over `patches` rows, of which one picture is. A layer's keys and values are
// done with when the next one begins: it has one layer's memory for them.
ExecutorSpec vision_spec(const VisionLayerShape& shape, int32_t patches);

// inv_freq, axes: Rope's; none: patches are not rotated.
void run_vision_layer(Executor& executor, const VisionLayer& layer, int index, const VisionLayerShape& shape,
                      std::span<const float> inv_freq = {}, std::span<const uint8_t> axes = {});

// What a GGUF file says of colours (clip.vision.image_mean and image_std), where it does.
void read_gguf_colours(const io::Gguf& file, std::array<float, 3>& mean, std::array<float, 3>& deviation);

}  // namespace millrace
