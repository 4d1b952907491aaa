#include "quant/allocate.h"

#include <algorithm>
#include <queue>

namespace millrace::quant {
namespace {

// The options worth taking, smallest first: each next one costs less, and its gain per byte is below the one
// before it (the lower convex hull of cost over bytes).
std::vector<size_t> useful_options(const std::vector<TypeOption>& options) {
  std::vector<size_t> order(options.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return options[a].bytes != options[b].bytes ? options[a].bytes < options[b].bytes
                                                : options[a].cost < options[b].cost;
  });
  const auto slope = [&](size_t a, size_t b) {
    return (options[a].cost - options[b].cost) / static_cast<double>(options[b].bytes - options[a].bytes);
  };
  std::vector<size_t> hull;
  for (const size_t next : order) {
    if (!hull.empty() && options[next].cost >= options[hull.back()].cost) continue;
    if (!hull.empty() && options[next].bytes == options[hull.back()].bytes) continue;
    while (hull.size() > 1 &&
           slope(hull[hull.size() - 2], hull.back()) <= slope(hull[hull.size() - 2], next)) {
      hull.pop_back();
    }
    hull.push_back(next);
  }
  return hull;
}

struct Step {
  double gain_per_byte;
  size_t tensor, place;  // to hull[place] of that tensor
  bool operator<(const Step& other) const {
    return gain_per_byte != other.gain_per_byte ? gain_per_byte < other.gain_per_byte : tensor > other.tensor;
  }
};

}  // namespace

size_t least_bytes(std::span<const std::vector<TypeOption>> tensors) {
  size_t sum = 0;
  for (const auto& options : tensors) {
    size_t least = options.front().bytes;
    for (const TypeOption& option : options) least = std::min(least, option.bytes);
    sum += least;
  }
  return sum;
}

std::vector<size_t> allocate(std::span<const std::vector<TypeOption>> tensors, size_t budget) {
  std::vector<std::vector<size_t>> hulls;
  std::vector<size_t> chosen;
  std::priority_queue<Step> steps;
  const auto offer = [&](size_t t, size_t place) {
    if (place >= hulls[t].size()) return;
    const TypeOption &from = tensors[t][hulls[t][place - 1]], &to = tensors[t][hulls[t][place]];
    steps.push({(from.cost - to.cost) / static_cast<double>(to.bytes - from.bytes), t, place});
  };
  size_t used = least_bytes(tensors);
  for (size_t t = 0; t < tensors.size(); ++t) {
    hulls.push_back(useful_options(tensors[t]));
    chosen.push_back(hulls[t][0]);
    offer(t, 1);
  }
  while (!steps.empty()) {
    const Step step = steps.top();
    steps.pop();
    const size_t to = hulls[step.tensor][step.place];
    const size_t more = tensors[step.tensor][to].bytes - tensors[step.tensor][chosen[step.tensor]].bytes;
    if (used + more > budget) continue;  // a smaller tensor's step may still fit
    used += more;
    chosen[step.tensor] = to;
    offer(step.tensor, step.place + 1);
  }
  return chosen;
}

}  // namespace millrace::quant
