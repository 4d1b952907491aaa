#include "backend/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace millrace::mixed {
namespace {

// "3", "0-5", "0-2,7"
std::string ranges_text(const std::vector<int32_t>& ascending) {
  std::string out;
  for (size_t i = 0; i < ascending.size();) {
    size_t n = 1;
    while (i + n < ascending.size() && ascending[i + n] == ascending[i] + static_cast<int32_t>(n)) ++n;
    out += fmt::format("{}{}", out.empty() ? "" : ",", ascending[i]);
    if (n > 1) out += fmt::format("-{}", ascending[i + n - 1]);
    i += n;
  }
  return out;
}

int32_t number_of(const std::string& option, const std::string& text, std::string_view part,
                  int32_t experts) {
  int32_t value = -1;
  const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
  if (error != std::errc() || end != part.data() + part.size() || value < 0 || value > experts) {
    throw_error(ErrorCode::kBadInput,
                "{}: found \"{}\", expected a number up to {}, a list of experts such as 0-7,12, or all",
                option, text, experts);
  }
  return value;
}

struct Candidate {
  int32_t layer, expert;
  double share;  // of its layer's uses
};

// Experts of one layer, the most used first; without counts in order.
std::vector<Candidate> by_use(const PlacementInput& input, int32_t layer) {
  const auto l = static_cast<size_t>(layer);
  const std::vector<double> none;
  const std::vector<double>& counts = l < input.counts.size() ? input.counts[l] : none;
  const double all = std::accumulate(counts.begin(), counts.end(), 0.0);
  std::vector<Candidate> out;
  for (int32_t e = 0; e < input.experts; ++e) {
    out.push_back({layer, e, all > 0.0 ? counts[static_cast<size_t>(e)] / all : 0.0});
  }
  std::stable_sort(out.begin(), out.end(),
                   [](const Candidate& a, const Candidate& b) { return a.share > b.share; });
  return out;
}

// What is left of the memory: experts take of it, unless the user has said which, the most used of all layers
// first; without counts all of a layer before some of the next, so that few layers have experts on both.
size_t place_experts(const PlacementInput& input, size_t left, Placement& out) {
  const auto all = static_cast<size_t>(input.experts);
  const auto each = [&](int32_t layer) {
    return (input.layers[static_cast<size_t>(layer)].experts + all - 1) / all;
  };
  std::vector<Candidate> wanted;
  for (int32_t l = 0; l < std::ssize(input.layers); ++l) {
    Placement::Layer& to = out.layers[static_cast<size_t>(l)];
    if (input.layers[static_cast<size_t>(l)].experts == 0) continue;
    to.experts = input.experts;
    if (!to.on_first) continue;
    std::vector<Candidate> some = by_use(input, l);
    if (input.second_count) some.resize(static_cast<size_t>(input.experts - *input.second_count));
    if (input.second_experts) {
      std::erase_if(some, [&](const Candidate& c) {
        return std::find(input.second_experts->begin(), input.second_experts->end(), c.expert) !=
               input.second_experts->end();
      });
    }
    wanted.insert(wanted.end(), some.begin(), some.end());
  }
  const bool said = input.second_count || input.second_experts;
  if (!said) {
    std::stable_sort(wanted.begin(), wanted.end(),
                     [](const Candidate& a, const Candidate& b) { return a.share > b.share; });
  }
  for (const Candidate& c : wanted) {
    const size_t bytes = each(c.layer);
    if (!said && bytes > left) continue;
    left -= std::min(left, bytes);
    out.layers[static_cast<size_t>(c.layer)].first_experts.push_back(c.expert);
  }
  for (Placement::Layer& layer : out.layers) {
    std::sort(layer.first_experts.begin(), layer.first_experts.end());
  }
  return left;
}

}  // namespace

int32_t Placement::layers_on_first() const {
  return static_cast<int32_t>(
      std::count_if(layers.begin(), layers.end(), [](const Layer& layer) { return layer.on_first; }));
}

bool Placement::shares_experts(int32_t layer) const {
  const Layer& l = layers[static_cast<size_t>(layer)];
  return l.on_first && std::ssize(l.first_experts) < l.experts;
}

std::string Placement::text(const std::string& first, const std::string& second) const {
  std::vector<int32_t> on_first, on_second;
  for (int32_t l = 0; l < std::ssize(layers); ++l) {
    (layers[static_cast<size_t>(l)].on_first ? on_first : on_second).push_back(l);
  }
  const auto layers_text = [](const std::vector<int32_t>& ids) {
    return fmt::format("{} {}", ids.size() == 1 ? "layer" : "layers", ranges_text(ids));
  };
  int64_t all = 0, here = 0;
  for (const Layer& layer : layers) {
    all += layer.experts;
    here += std::ssize(layer.first_experts);
  }
  std::vector<std::string> of_first = {"the output"}, of_second;
  (embedding_on_first ? of_first : of_second).push_back("the embedding");
  if (!on_first.empty()) of_first.push_back(layers_text(on_first));
  if (!on_second.empty()) of_second.push_back(layers_text(on_second));
  if (all > 0) {
    if (here > 0) of_first.push_back(fmt::format("{} of {} experts", here, all));
    if (here < all) of_second.push_back(fmt::format("{} of {} experts", all - here, all));
  }
  if (of_second.empty()) of_second.push_back("nothing");
  return fmt::format("{} on {}; {} on {}", fmt::join(of_first, ", "), first, fmt::join(of_second, ", "),
                     second);
}

std::string Placement::identity() const {
  std::string out = embedding_on_first ? "e" : "-";
  for (const Layer& layer : layers) {
    out += layer.on_first ? fmt::format(";{}", ranges_text(layer.first_experts)) : ";-";
  }
  return out;
}

Placement plan_placement(const PlacementInput& input) {
  Placement out;
  const auto count = static_cast<int32_t>(input.layers.size());
  out.layers.resize(input.layers.size());
  size_t left = input.memory;
  if (input.output > left) {
    throw_error(ErrorCode::kNoMemory,
                "memory: found {} bytes for weights, expected at least {} for the output matrix", left,
                input.output);
  }
  left -= input.output;
  // Layers, from the last on.
  const int32_t wanted = input.first_layers.value_or(count);
  int32_t taken = 0;
  for (int32_t l = count - 1; l >= 0; --l) {
    const PlacementInput::Layer& layer = input.layers[static_cast<size_t>(l)];
    const size_t bytes = layer.dense + layer.kv;
    const bool fits = bytes <= left;
    out.layers[static_cast<size_t>(l)].on_first = taken < wanted && taken == count - 1 - l && fits;
    if (!out.layers[static_cast<size_t>(l)].on_first) continue;
    left -= bytes;
    ++taken;
  }
  if (input.first_layers && taken < wanted) {
    throw_error(ErrorCode::kNoMemory, "gpu layers: found {}, expected at most {}: so many fit", wanted,
                taken);
  }
  left = place_experts(input, left, out);
  // With all the rest there too, a step begins where it goes on.
  out.embedding_on_first = input.embedding <= left && taken == count;
  for (int32_t l = 0; l < count; ++l) out.embedding_on_first &= !out.shares_experts(l);
  return out;
}

void parse_experts(const std::string& option, const std::string& text, PlacementInput& input) {
  const int32_t experts = input.experts;
  std::vector<int32_t> ids;
  const auto add = [&](int32_t first, int32_t last) {
    for (int32_t e = first; e <= last; ++e) ids.push_back(e);
  };
  if (text == "all" || text.find_first_of(",-") == std::string::npos) {
    input.second_count = text == "all" ? experts : number_of(option, text, text, experts);
    return;
  }
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string_view part = std::string_view(text).substr(at, end - at);
    const size_t dash = part.find('-');
    const int32_t first = number_of(option, text, part.substr(0, dash), experts - 1);
    const int32_t last =
        dash == std::string_view::npos ? first : number_of(option, text, part.substr(dash + 1), experts - 1);
    if (last < first) number_of(option, text, "", experts);
    add(first, last);
    at = end + 1;
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  input.second_experts = std::move(ids);
}

}  // namespace millrace::mixed
