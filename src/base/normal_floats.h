// Gaussian numbers for tests: to the bit those of libstdc++'s std::normal_distribution<float> over a
// std::mt19937. That one takes two logarithms in long double for every draw, which are software on ARM and
// twice so under qemu: a third of the time of the tests of kernels went there.
#pragma once

#include <cmath>
#include <random>

namespace millrace {

class NormalFloats {
 public:
  explicit NormalFloats(float scale = 1.0f) : scale_(scale) {}

  float operator()(std::mt19937& random) {
    if (has_saved_) {
      has_saved_ = false;
      return saved_ * scale_ + 0.0f;
    }
    // Marsaglia's polar method: a point of the unit disk gives two numbers.
    float x = 0.0f, y = 0.0f, square = 0.0f;
    do {
      x = 2.0f * uniform(random) - 1.0f;
      y = 2.0f * uniform(random) - 1.0f;
      square = x * x + y * y;
    } while (square > 1.0f || square == 0.0f);
    const float factor = std::sqrt(-2.0f * std::log(square) / square);
    saved_ = x * factor;
    has_saved_ = true;
    return y * factor * scale_ + 0.0f;
  }

 private:
  // In [0, 1): 32 bits, of which a float keeps 24.
  static float uniform(std::mt19937& random) {
    const float u = static_cast<float>(random()) / 4294967296.0f;
    return u < 1.0f ? u : std::nextafter(1.0f, 0.0f);
  }

  float scale_, saved_ = 0.0f;
  bool has_saved_ = false;
};

}  // namespace millrace
