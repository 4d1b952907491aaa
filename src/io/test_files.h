// For tests: GGUF and safetensors files put together field by field, so that each field can be made wrong.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "io/gguf_types.h"

namespace millrace::io::testing {

template <class T>
std::string raw(T value) {
  std::string out(sizeof value, '\0');
  std::memcpy(out.data(), &value, sizeof value);
  return out;
}

inline std::string gguf_string(std::string_view text) {
  return raw<uint64_t>(text.size()) + std::string(text);
}

// A copy of exactly the file's size on the heap: a read past it is seen by the address sanitizer.
class Buffer {
 public:
  explicit Buffer(std::string_view text) : size_(text.size()), data_(new std::byte[text.size()]) {
    if (size_ > 0) std::memcpy(data_.get(), text.data(), size_);
  }
  std::span<const std::byte> bytes() const { return {data_.get(), size_}; }

 private:
  size_t size_;
  std::unique_ptr<std::byte[]> data_;
};

// The message of the Error that `action` must throw; one line.
inline std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return "";
}

inline void expect_contains(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << message << "\n  lacks " << part;
  }
}

// Where a field begins, and what messages call it.
struct Mark {
  size_t begin;
  std::string field;
};

class GgufBuilder {
 public:
  uint32_t version = 3;
  std::optional<uint64_t> tensor_count, metadata_count;  // to lie about them
  uint64_t alignment = 32;                               // used for padding; declare it with u32() as well

  GgufBuilder& value(std::string_view key, GgufType type, std::string payload) {
    const std::string entry = "metadata " + std::to_string(num_metadata_++);
    const std::string named = "metadata '" + std::string(key) + "'";
    add(metadata_, entry + " key length", gguf_string(key));
    add(metadata_, named + " type", raw(static_cast<uint32_t>(type)));
    const bool text = type == GgufType::kString;
    add(metadata_, text ? named + " length" : named, std::move(payload));
    return *this;
  }
  GgufBuilder& u32(std::string_view key, uint32_t v) { return value(key, GgufType::kUint32, raw(v)); }
  GgufBuilder& string(std::string_view key, std::string_view v) {
    return value(key, GgufType::kString, gguf_string(v));
  }
  // `elements` encoded; `length` as the file shall state it.
  GgufBuilder& array(std::string_view key, GgufType type, uint64_t length,
                     const std::vector<std::string>& elements) {
    const std::string named = "metadata '" + std::string(key) + "'";
    add(metadata_, "metadata " + std::to_string(num_metadata_++) + " key length", gguf_string(key));
    add(metadata_, named + " type", raw(static_cast<uint32_t>(GgufType::kArray)));
    add(metadata_, named + " array type", raw(static_cast<uint32_t>(type)));
    add(metadata_, named + " array length", raw(length));
    for (size_t i = 0; i < elements.size(); ++i) {
      const std::string element = named + " element " + std::to_string(i);
      add(metadata_, type == GgufType::kString ? element + " length" : element, elements[i]);
    }
    return *this;
  }
  // `dims` fastest first, as in the file.
  GgufBuilder& tensor(std::string_view name, const std::vector<uint64_t>& dims, uint32_t type,
                      uint64_t offset) {
    const std::string named = "tensor '" + std::string(name) + "'";
    add(tensors_, "tensor " + std::to_string(num_tensors_++) + " name length", gguf_string(name));
    add(tensors_, named + " rank", raw(static_cast<uint32_t>(dims.size())));
    for (size_t i = 0; i < dims.size(); ++i)
      add(tensors_, named + " dimension " + std::to_string(i), raw(dims[i]));
    add(tensors_, named + " type", raw(type));
    add(tensors_, named + " offset", raw(offset));
    return *this;
  }
  GgufBuilder& data(std::string bytes) {
    data_ = std::move(bytes);
    return *this;
  }

  // The whole file; marks() then tells where its fields are.
  std::string build() {
    Section file;
    add(file, "magic", "GGUF");
    add(file, "version", raw(version));
    add(file, "tensor count", raw(tensor_count.value_or(num_tensors_)));
    add(file, "metadata count", raw(metadata_count.value_or(num_metadata_)));
    for (const Section* section : {&metadata_, &tensors_}) {
      for (const Mark& mark : section->marks)
        file.marks.push_back({mark.begin + file.bytes.size(), mark.field});
      file.bytes += section->bytes;
    }
    header_bytes_ = file.bytes.size();
    marks_ = file.marks;
    if (!data_.empty()) file.bytes.resize((header_bytes_ + alignment - 1) / alignment * alignment, '\0');
    return file.bytes + data_;
  }
  const std::vector<Mark>& marks() const { return marks_; }
  size_t header_bytes() const { return header_bytes_; }

 private:
  struct Section {
    std::string bytes;
    std::vector<Mark> marks;
  };
  static void add(Section& section, std::string field, std::string bytes) {
    section.marks.push_back({section.bytes.size(), std::move(field)});
    section.bytes += bytes;
  }

  Section metadata_, tensors_;
  uint64_t num_metadata_ = 0, num_tensors_ = 0;
  std::string data_;
  std::vector<Mark> marks_;
  size_t header_bytes_ = 0;
};

inline std::string safetensors_file(std::string_view header, std::string_view data) {
  return raw<uint64_t>(header.size()) + std::string(header) + std::string(data);
}

// A directory that is removed with everything in it.
class TempDir {
 public:
  TempDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "millrace_test_XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  // Writes a file and returns its path.
  std::string write(const std::string& name, std::string_view bytes) const {
    const std::string file = path_ + "/" + name;
    std::ofstream(file, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return file;
  }
  size_t num_files() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::string path_;
};

}  // namespace millrace::io::testing
