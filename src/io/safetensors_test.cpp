// safetensors reading: a good file, that file cut at every byte, every field of the header made wrong,
// shards.
#include "io/safetensors.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "io/test_files.h"

namespace millrace::io {
namespace {

using testing::Buffer;
using testing::expect_contains;
using testing::message_of;
using testing::raw;
using testing::safetensors_file;
using testing::TempDir;

std::string safetensors_error(const std::string& bytes) {
  const Buffer buffer(bytes);
  return message_of([&] { Safetensors::parse(buffer.bytes(), "x.safetensors"); });
}

// The header alone decides, with 64 bytes of data behind it.
std::string header_error(const std::string& header) {
  return safetensors_error(safetensors_file(header, std::string(64, 'd')));
}

std::string safetensors_example() {
  return safetensors_file(
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[24,36]},)"
      R"("a":{"dtype":"F32","shape":[1,2,3],"data_offsets":[0,24]},"s":{"shape":[],"data_offsets":[36,40],"dtype":"F32"},)"
      R"("n":{"dtype":"I64","shape":[1],"data_offsets":[40,48]},"e":{"dtype":"F16","shape":[0,7],"data_offsets":[40,40]}})",
      std::string(24, 'a') + std::string(12, 'b') + std::string(12, 'c'));
}

TEST(Safetensors, ReadsShapesTypesAndData) {
  const Buffer buffer(safetensors_example());
  const Safetensors file = Safetensors::parse(buffer.bytes(), "x.safetensors");
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.tensors()[0].name, "a");  // in order of their bytes
  const TensorView* b = file.find_tensor("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->type, DType::kBF16);
  EXPECT_EQ(b->rank, 2);
  EXPECT_EQ(b->shape[0], 2);
  EXPECT_EQ(b->shape[1], 3);
  EXPECT_EQ(b->row_stride_bytes, 6);
  EXPECT_EQ(b->bytes(), 12u);
  EXPECT_EQ(static_cast<char>(*b->data), 'b');
  EXPECT_EQ(file.find_tensor("s")->rank, 0);
  EXPECT_EQ(file.find_tensor("s")->elements(), 1);
  EXPECT_EQ(file.find_tensor("e")->elements(), 0);
  EXPECT_EQ(file.find_tensor("x"), nullptr);
}

TEST(Safetensors, AnUnsupportedTypeFailsOnlyWhenAskedFor) {
  const Buffer buffer(safetensors_example());
  const Safetensors file = Safetensors::parse(buffer.bytes(), "x.safetensors");
  expect_contains(message_of([&] { file.find_tensor("n"); }),
                  {"x.safetensors: tensor 'n' dtype: found 'I64'", "not supported"});
}

TEST(Safetensors, CopiesWhatIsNotAligned) {
  // A header of odd length puts every number at an odd address.
  for (const std::string padding : {"", " ", "  ", "   "}) {
    std::string header =
        R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[1,9]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
    header += padding;
    const std::string data = "x" + raw(1.5f) + raw(-2.0f);
    const Buffer buffer(safetensors_file(header, data));
    const Safetensors file = Safetensors::parse(buffer.bytes(), "x");
    const TensorView* a = file.find_tensor("a");
    ASSERT_EQ(reinterpret_cast<uintptr_t>(a->data) % 4, 0u);
    EXPECT_EQ(reinterpret_cast<const float*>(a->data)[1], -2.0f);
    const std::byte* begin = buffer.bytes().data();
    const bool mapped = a->data >= begin && a->data < begin + buffer.bytes().size();
    EXPECT_EQ(file.copied_bytes(), mapped ? 0u : 8u);
  }
}

TEST(Safetensors, CutAnywhereIsAnError) {
  const std::string whole = safetensors_example();
  for (size_t cut = 0; cut < whole.size(); ++cut) {
    const std::string message = safetensors_error(whole.substr(0, cut));
    EXPECT_TRUE(message.starts_with(cut < whole.size() - 48 ? "x.safetensors: header length: found"
                                                            : "x.safetensors: tensor '"))
        << cut << ": " << message;
  }
}

// The header cut with its length corrected: the JSON itself is incomplete.
TEST(Safetensors, CutHeaderIsAnError) {
  const std::string header = safetensors_example().substr(8, safetensors_example().size() - 8 - 48);
  for (size_t cut = 2; cut < header.size(); ++cut) {
    EXPECT_TRUE(
        header_error(header.substr(0, cut)).starts_with("x.safetensors: header: found what is not JSON"))
        << cut;
  }
}

TEST(Safetensors, RefusesABadHeaderLength) {
  for (const uint64_t length : {uint64_t{0}, uint64_t{1}, uint64_t{57}, uint64_t{1} << 40, ~uint64_t{0}}) {
    expect_contains(safetensors_error(raw(length) + std::string(56, ' ')),
                    {"x.safetensors: header length: found " + std::to_string(length) + ", expected 2 to 56"});
  }
}

TEST(Safetensors, RefusesWhatIsNoHeader) {
  expect_contains(header_error("[1]"), {"header: found an array, expected an object"});
  expect_contains(header_error("17"), {"header: found 17, expected an object"});
  expect_contains(header_error("{} {}"), {"header: found what is not JSON at its byte"});
  expect_contains(header_error("{\"a\xff\":1}"), {"header: found what is not JSON"});
  expect_contains(header_error(R"({"a":[1]})"), {"tensor 'a': found an array, expected an object"});
  expect_contains(header_error(R"({"a":null})"), {"tensor 'a': found null, expected an object"});
  expect_contains(header_error(R"({"__metadata__":3})"), {"__metadata__: found 3, expected an object"});
  expect_contains(header_error(R"({"__metadata__":{"a":{}}})"),
                  {"__metadata__: found an object, expected strings"});
  expect_contains(header_error(std::string(50000, '[')), {"header: found an array"});
}

TEST(Safetensors, RefusesBadFields) {
  const auto with = [](const std::string& fields) { return header_error(R"({"t":{)" + fields + "}}"); };
  expect_contains(with(R"("dtype":"F32","shape":[2])"), {"tensor 't' data_offsets: found nothing"});
  expect_contains(with(R"("dtype":"F32","data_offsets":[0,8])"), {"tensor 't' shape: found nothing"});
  expect_contains(with(R"("shape":[2],"data_offsets":[0,8])"), {"tensor 't' dtype: found nothing"});
  expect_contains(with(R"("dtype":3)"), {"tensor 't' dtype: found 3, expected a string"});
  expect_contains(with(R"("shape":"2")"), {"tensor 't' shape: found '2', expected an array"});
  expect_contains(with(R"("shape":[-2])"), {"tensor 't' shape: found -2, expected an integer of 0 or more"});
  expect_contains(with(R"("shape":[2.5])"), {"tensor 't' shape: found '2.5', expected an integer"});
  expect_contains(with(R"("shape":[1e999])"), {"header: found what is not JSON"});
  expect_contains(with(R"("shape":[18446744073709551616])"),
                  {"tensor 't' shape: found '18446744073709551616'"});
  expect_contains(with(R"("shape":[[1]])"), {"tensor 't' shape: found an array, expected an integer"});
  expect_contains(with(R"("shape":[1,1,1,1,1,1])"), {"tensor 't' shape: found more than 5 dimensions"});
  expect_contains(with(R"("shape":[1,1,1,4294967296,4294967296])"),
                  {"tensor 't' shape: found more elements than 64 bits count"});
  expect_contains(with(R"("shape":[1],"shape":[1])"), {"tensor 't' shape: found the field a second time"});
  expect_contains(with(R"("colour":1)"),
                  {"tensor 't' field: found 'colour', expected dtype, shape or data_offsets"});
  expect_contains(with(R"("data_offsets":[1])"), {"tensor 't' data_offsets: found 1 numbers, expected 2"});
  expect_contains(with(R"("data_offsets":[1,2,3])"),
                  {"tensor 't' data_offsets: found 3 numbers, expected 2"});
  expect_contains(with(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"),
                  {"found [8, 0], expected the smaller first"});
}

TEST(Safetensors, RefusesBadExtents) {
  const auto with = [](const std::string& type, const std::string& shape, const std::string& offsets) {
    return header_error(R"({"t":{"dtype":")" + type + R"(","shape":)" + shape + R"(,"data_offsets":)" +
                        offsets + "}}");
  };
  expect_contains(with("F32", "[2]", "[0,12]"), {"tensor 't' data_offsets: found 12 bytes, expected 8"});
  expect_contains(with("F32", "[17]", "[0,68]"),
                  {"tensor 't' data_offsets: found an end at 68, expected at most the 64"});
  expect_contains(with("F32", "[17]", "[18446744073709551612,18446744073709551615]"),
                  {"data_offsets: found an end at"});
  expect_contains(with("F32", "[4611686018427387904]", "[0,0]"),
                  {"tensor 't' shape: found 4611686018427387904"});
  expect_contains(with("U8", "[4294967296,4294967296]", "[0,0]"),
                  {"as dimension 1, expected a product below 2^63"});
  expect_contains(with("U8", "[0,4294967296,4294967296]", "[0,0]"), {"expected a product below 2^63"});
  expect_contains(with("I64", "[2]", "[0,8]"), {"tensor 't' data_offsets: found 8 bytes, expected 16"});
  expect_contains(header_error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                               R"("b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})"),
                  {"tensor 'b' data_offsets: found 4, inside tensor 'a', expected 8 or more"});
  expect_contains(header_error(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                               R"("a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})"),
                  {"tensor 'a': found the name a second time"});
}

std::string shard(const std::string& tensor) {
  return safetensors_file(R"({")" + tensor + R"(":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})",
                          tensor + tensor + tensor);
}

TEST(SafetensorsDir, OneFileOrShards) {
  const TempDir dir;
  expect_contains(
      message_of([&] { Safetensors::open_dir(dir.path()); }),
      {dir.path() + ": weights: found neither model.safetensors nor model.safetensors.index.json"});
  dir.write("model.safetensors.index.json", R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})");
  dir.write("1.safetensors", shard("a"));
  expect_contains(message_of([&] { Safetensors::open_dir(dir.path()); }),
                  {"index.json: weight_map 'b': found no file", "2.safetensors"});
  dir.write("2.safetensors", shard("b"));
  const Safetensors shards = Safetensors::open_dir(dir.path());
  ASSERT_EQ(shards.tensors().size(), 2u);
  EXPECT_EQ(static_cast<char>(*shards.find_tensor("b")->data), 'b');
  EXPECT_EQ(shards.mapped_bytes(), shard("a").size() * 2);
  dir.write("model.safetensors", shard("c"));
  EXPECT_NE(Safetensors::open_dir(dir.path()).find_tensor("c"), nullptr);
}

TEST(SafetensorsDir, RefusesABadIndex) {
  const TempDir dir;
  dir.write("1.safetensors", shard("a"));
  dir.write("2.safetensors", shard("b"));
  const auto error = [&](const std::string& index) {
    dir.write("model.safetensors.index.json", index);
    return message_of([&] { Safetensors::open_dir(dir.path()); });
  };
  expect_contains(error("{"), {"index.json: JSON: found a syntax error at byte 2"});
  expect_contains(error("[]"), {"index.json: JSON: found array, expected an object"});
  expect_contains(error("{}"), {"index.json: weight_map: found nothing"});
  expect_contains(error(R"({"weight_map":3})"), {"weight_map: found number"});
  expect_contains(error(R"({"weight_map":{"a":3}})"),
                  {"weight_map 'a': found number, expected the name of a file"});
  for (const char* name : {"../1.safetensors", "/etc/passwd", "..", "", "a\\u0000b"}) {
    expect_contains(error(std::string(R"({"weight_map":{"a":")") + name + "\"}}"),
                    {"weight_map 'a': found '", "expected the name of a file in the same directory"});
  }
  expect_contains(error(R"({"weight_map":{"b":"1.safetensors"}})"),
                  {"weight_map 'b': found it not in", "1.safetensors"});
  expect_contains(error(R"({"weight_map":{"a":"2.safetensors","b":"1.safetensors"}})"), {"found it not in"});
  dir.write("2.safetensors", shard("a"));
  expect_contains(error(R"({"weight_map":{"a":"1.safetensors","c":"2.safetensors"}})"),
                  {"2.safetensors: tensor 'a': found the name in an earlier file too"});
}

}  // namespace
}  // namespace millrace::io
