#include "hub/gguf_head.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <fstream>

namespace millrace::hub {
namespace {

constexpr uint32_t kString = 8, kArray = 9;

class HeadWalk {
 public:
  explicit HeadWalk(std::string_view bytes) : bytes_(bytes) {}

  // Walks on until the end, or until `key` with a text as its value is found.
  void walk(std::string_view key = {}) {
    if (number<uint32_t>() != 0x46554747) return;  // "GGUF"
    number<uint32_t>();                            // version
    const uint64_t tensors = number<uint64_t>(), entries = number<uint64_t>();
    for (uint64_t i = 0; i < entries && going(); ++i) {
      const std::string_view name = string();
      const uint32_t type = number<uint32_t>();
      if (!key.empty() && name == key && type == kString) {
        found_ = string();
        return;
      }
      skip_value(type);
    }
    for (uint64_t i = 0; i < tensors && going(); ++i) {
      string();
      const uint32_t rank = number<uint32_t>();
      skip(uint64_t{std::min<uint32_t>(rank, 8)} * 8 + 4 + 8);  // dimensions, type, offset
    }
  }
  bool whole() const { return !short_; }
  std::string_view found() const { return found_; }

 private:
  bool going() const { return !short_ && !strange_; }

  template <class T>
  T number() {
    static_assert(std::endian::native == std::endian::little);
    T value{};
    if (bytes_.size() - at_ < sizeof(T)) {
      short_ = true;
    } else {
      std::memcpy(&value, bytes_.data() + at_, sizeof(T));
      at_ += sizeof(T);
    }
    return value;
  }
  void skip(uint64_t bytes) {
    if (bytes > bytes_.size() - at_) {
      short_ = true;
    } else {
      at_ += bytes;
    }
  }
  std::string_view string() {
    const uint64_t length = number<uint64_t>();
    const size_t begin = at_;
    skip(length);
    return short_ ? std::string_view() : bytes_.substr(begin, length);
  }
  void skip_value(uint32_t type) {
    constexpr std::array<uint8_t, 13> kBytes = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    if (type >= kBytes.size()) {
      strange_ = true;
    } else if (type == kString) {
      string();
    } else if (type == kArray) {
      const uint32_t element = number<uint32_t>();
      const uint64_t count = number<uint64_t>();
      if (element >= kBytes.size() || element == kArray || count > (uint64_t{1} << 32)) {
        strange_ = true;
      } else if (element == kString) {
        for (uint64_t i = 0; i < count && going(); ++i) string();
      } else {
        skip(count * kBytes[element]);
      }
    } else {
      skip(kBytes[type]);
    }
  }

  std::string_view bytes_, found_;
  size_t at_ = 0;
  bool short_ = false, strange_ = false;
};

}  // namespace

bool has_whole_gguf_head(std::string_view bytes) {
  HeadWalk walk(bytes);
  walk.walk();
  return walk.whole();
}

std::string gguf_architecture(const std::string& path) {
  std::string bytes(size_t{1} << 20, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  bytes.resize(static_cast<size_t>(std::max<std::streamsize>(0, file.gcount())));
  HeadWalk walk(bytes);
  walk.walk("general.architecture");
  return std::string(walk.found());
}

}  // namespace millrace::hub
