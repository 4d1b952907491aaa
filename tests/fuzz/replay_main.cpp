// A driver for fuzz targets without libFuzzer: every kept input as it is, cut at every length (the first
// 4096), and mutated a fixed number of times from a fixed seed. Also holds single allocations to a limit: a
// small file justifies no large one.
//   NAME_replay MUTATIONS DIRECTORY...
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <new>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

constexpr size_t kMaxAllocation = size_t{64} << 20;

// splitmix64: the same sequence everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  size_t below(size_t bound) { return static_cast<size_t>(next() % bound); }

 private:
  uint64_t state_;
};

// The input in a buffer of exactly its size, so that the address sanitizer sees a read past it.
void run(const std::string& input) {
  const std::unique_ptr<uint8_t[]> copy(new uint8_t[input.size()]);
  if (!input.empty()) std::memcpy(copy.get(), input.data(), input.size());
  LLVMFuzzerTestOneInput(copy.get(), input.size());
}

void mutate_once(std::string& input, const std::vector<std::string>& all, Random& random) {
  constexpr uint64_t kNumbers[] = {0,
                                   1,
                                   2,
                                   7,
                                   8,
                                   31,
                                   0x7f,
                                   0x80,
                                   0xff,
                                   0xffff,
                                   0x7fffffff,
                                   0x80000000,
                                   0xffffffff,
                                   uint64_t{1} << 40,
                                   ~uint64_t{0} >> 1,
                                   ~uint64_t{0} - 7,
                                   ~uint64_t{0}};
  if (input.empty()) input = all[random.below(all.size())];
  if (input.empty()) return;
  const size_t at = random.below(input.size());
  switch (random.below(7)) {
    case 0:
      input[at] = static_cast<char>(input[at] ^ (1 << random.below(8)));
      break;
    case 1:
      input[at] = static_cast<char>(random.next());
      break;
    case 2: {
      const uint64_t number = kNumbers[random.below(std::size(kNumbers))];
      std::memcpy(input.data() + at, &number,
                  std::min<size_t>(size_t{1} << random.below(4), input.size() - at));
      break;
    }
    case 3:
      input.resize(at);
      break;
    case 4:
      input.erase(at, 1 + random.below(8));
      break;
    case 5:
      input.insert(at, input.substr(random.below(input.size()), 1 + random.below(32)));
      break;
    default: {
      const std::string& other = all[random.below(all.size())];
      if (!other.empty()) input.replace(at, 16, other.substr(random.below(other.size()), 16));
    }
  }
}

std::vector<std::string> read_inputs(int num_directories, char** directories) {
  std::vector<std::filesystem::path> paths;
  for (int i = 0; i < num_directories; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(directories[i])) {
      if (entry.is_regular_file()) paths.push_back(entry.path());
    }
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> inputs;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

}  // namespace

// All forms that one operator delete serves: a sanitizer's own would take the ones that are missing, and
// complain of the mixture.
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  if (bytes > kMaxAllocation) {
    std::fprintf(stderr, "replay: an allocation of %zu bytes, expected at most %zu\n", bytes, kMaxAllocation);
    std::abort();
  }
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void* operator new(size_t bytes) {
  if (void* memory = operator new(bytes, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s MUTATIONS DIRECTORY...\n", argv[0]);
    return 2;
  }
  const long num_mutations = std::strtol(argv[1], nullptr, 10);
  const std::vector<std::string> inputs = read_inputs(argc - 2, argv + 2);
  if (inputs.empty()) {
    std::fprintf(stderr, "replay: %s: found no inputs, expected some\n", argv[2]);
    return 1;
  }
  size_t num_runs = 0;
  for (const std::string& input : inputs) {
    run(input);
    for (size_t cut = 0; cut < std::min<size_t>(input.size(), 4096); ++cut) run(input.substr(0, cut));
    num_runs += 1 + std::min<size_t>(input.size(), 4096);
  }
  for (long i = 0; i < num_mutations; ++i) {
    Random random(static_cast<uint64_t>(i));
    std::string input = inputs[random.below(inputs.size())];
    for (size_t changes = 1 + random.below(4); changes > 0; --changes) mutate_once(input, inputs, random);
    run(input);
    ++num_runs;
  }
  std::printf("replay: %zu inputs, %zu runs\n", inputs.size(), num_runs);
  return 0;
}
