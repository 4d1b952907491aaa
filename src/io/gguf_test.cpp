// GGUF reading: a good file field by field, that file cut at every byte, and every field made wrong in turn.
#include "io/gguf.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <set>

#include "io/test_files.h"

namespace millrace::io {
namespace {

using testing::Buffer;
using testing::expect_contains;
using testing::gguf_string;
using testing::GgufBuilder;
using testing::message_of;
using testing::raw;
using testing::TempDir;

constexpr uint32_t kF32 = 0, kQ4_0 = 2;

// Metadata of every kind, a [2, 3] F32 tensor at 0 and a [2, 32] Q4_0 tensor at 32.
GgufBuilder gguf_example() {
  GgufBuilder file;
  file.string("general.architecture", "llama")
      .u32("llama.block_count", 7)
      .value("a.u8", GgufType::kUint8, raw<uint8_t>(200))
      .value("a.i8", GgufType::kInt8, raw<int8_t>(-3))
      .value("a.u16", GgufType::kUint16, raw<uint16_t>(65535))
      .value("a.i16", GgufType::kInt16, raw<int16_t>(-300))
      .value("a.i32", GgufType::kInt32, raw<int32_t>(-70000))
      .value("a.u64", GgufType::kUint64, raw<uint64_t>(std::numeric_limits<uint64_t>::max()))
      .value("a.i64", GgufType::kInt64, raw<int64_t>(std::numeric_limits<int64_t>::min()))
      .value("a.f32", GgufType::kFloat32, raw(0.5f))
      .value("a.f64", GgufType::kFloat64, raw(1e-300))
      .value("a.bool", GgufType::kBool, raw<uint8_t>(1))
      .array("tokens", GgufType::kString, 3, {gguf_string("x"), gguf_string(""), gguf_string("\n\xff")})
      .array("scores", GgufType::kFloat32, 2, {raw(1.5f), raw(-2.0f)})
      .array("types", GgufType::kInt32, 2, {raw<int32_t>(1), raw<int32_t>(-1)})
      .array("flags", GgufType::kBool, 2, {raw<uint8_t>(0), raw<uint8_t>(1)})
      .array("none", GgufType::kUint8, 0, {})
      .tensor("a.weight", {3, 2}, kF32, 0)
      .tensor("b.weight", {32, 2}, kQ4_0, 32)
      .data(std::string(24, 'a') + std::string(8, '\0') + std::string(36, 'b'));
  return file;
}

std::string gguf_error(const std::string& bytes) {
  const Buffer buffer(bytes);
  return message_of([&] { Gguf::parse(buffer.bytes(), "x.gguf"); });
}
std::string gguf_error(GgufBuilder builder) { return gguf_error(builder.build()); }

TEST(Gguf, ReadsEveryKindOfMetadata) {
  const Buffer buffer(gguf_example().build());
  const Gguf gguf = Gguf::parse(buffer.bytes(), "x.gguf");
  EXPECT_EQ(gguf.path(), "x.gguf");
  EXPECT_EQ(gguf.metadata().size(), 17u);
  EXPECT_EQ(gguf.get_string("general.architecture"), "llama");
  EXPECT_EQ(gguf.get_int("llama.block_count"), 7);
  EXPECT_EQ(gguf.get_int("a.u8"), 200);
  EXPECT_EQ(gguf.get_int("a.i8"), -3);
  EXPECT_EQ(gguf.get_int("a.u16"), 65535);
  EXPECT_EQ(gguf.get_int("a.i16"), -300);
  EXPECT_EQ(gguf.get_int("a.i32", 1), -70000);
  EXPECT_EQ(gguf.get_int("a.i64"), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(gguf.get_real("a.f32"), 0.5);
  EXPECT_EQ(gguf.get_real("a.f64", 3), 1e-300);
  EXPECT_EQ(gguf.get_real("a.i8"), -3.0);
  EXPECT_TRUE(gguf.get_bool("a.bool", false));
  EXPECT_EQ(gguf.get_array("tokens")->strings, (std::vector<std::string_view>{"x", "", "\n\xff"}));
  EXPECT_EQ(gguf.get_array("scores")->reals, (std::vector<double>{1.5, -2.0}));
  EXPECT_EQ(gguf.get_array("types")->integers, (std::vector<int64_t>{1, -1}));
  EXPECT_EQ(gguf.get_array("flags")->integers, (std::vector<int64_t>{0, 1}));
  EXPECT_TRUE(gguf.get_array("none")->integers.empty());
}

TEST(Gguf, TensorsLieInTheFileSlowestDimensionFirst) {
  const Buffer buffer(gguf_example().build());
  const Gguf gguf = Gguf::parse(buffer.bytes(), "x.gguf");
  ASSERT_EQ(gguf.tensors().size(), 2u);
  const TensorView* b = gguf.find_tensor("b.weight");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->type, DType::kQ4_0);
  EXPECT_EQ(b->rank, 2);
  EXPECT_EQ(b->shape[0], 2);
  EXPECT_EQ(b->shape[1], 32);
  EXPECT_EQ(b->row_stride_bytes, 18);
  EXPECT_EQ(b->bytes(), 36u);
  EXPECT_EQ(b->data + b->bytes(), buffer.bytes().data() + buffer.bytes().size());
  EXPECT_EQ(static_cast<char>(*b->data), 'b');
  EXPECT_EQ(gguf.tensors()[0].shape[0], 2);
  EXPECT_EQ(gguf.tensors()[0].shape[1], 3);
  EXPECT_EQ(gguf.find_tensor("c.weight"), nullptr);
}

TEST(Gguf, ReadsVersion2AndFilesWithoutTensors) {
  GgufBuilder file = gguf_example();
  file.version = 2;
  const Buffer buffer(file.build());
  EXPECT_EQ(Gguf::parse(buffer.bytes(), "x").tensors().size(), 2u);
  const Buffer bare(GgufBuilder().build());
  EXPECT_TRUE(Gguf::parse(bare.bytes(), "x").tensors().empty());
}

TEST(Gguf, HonoursTheAlignment) {
  GgufBuilder file;
  file.alignment = 64;
  file.u32("general.alignment", 64)
      .tensor("a", {1}, kF32, 0)
      .tensor("b", {1}, kF32, 64)
      .data(std::string(68, '\1'));
  const Buffer buffer(file.build());
  const Gguf gguf = Gguf::parse(buffer.bytes(), "x");
  EXPECT_EQ((gguf.find_tensor("b")->data - buffer.bytes().data()) % 64, 0);
  for (const uint32_t bad : {0u, 1u, 4u, 48u, 0x80000000u}) {
    expect_contains(
        gguf_error(GgufBuilder().u32("general.alignment", bad)),
        {"x.gguf: metadata 'general.alignment': found " + std::to_string(bad), "expected a power of two"});
  }
  expect_contains(gguf_error(GgufBuilder().string("general.alignment", "32")), {"expected uint32"});
}

// The heart of it: wherever the file is cut, the message names the file and a field at or before the cut.
TEST(Gguf, CutAnywhereNamesTheField) {
  GgufBuilder builder = gguf_example();
  const std::string whole = builder.build();
  std::set<std::string> named;
  for (size_t cut = 0; cut < whole.size(); ++cut) {
    const std::string message = gguf_error(whole.substr(0, cut));
    ASSERT_TRUE(message.starts_with("x.gguf: ")) << cut << ": " << message;
    const std::string field = message.substr(8, message.find(": found") - 8);
    named.insert(field);
    if (cut >= builder.header_bytes()) {
      // Only the data is short: some tensor says so.
      EXPECT_TRUE(field.ends_with("data") || field.ends_with("shape")) << cut << ": " << message;
      continue;
    }
    bool known = false;
    for (const auto& mark : builder.marks()) known = known || (mark.begin <= cut && mark.field == field);
    EXPECT_TRUE(known) << cut << ": " << message;
  }
  // Not one early check that catches everything: each kind of field has its own say.
  for (const char* field :
       {"magic", "version", "tensor count", "metadata count", "metadata 'tokens' array length",
        "tensor 'b.weight' dimension 1", "tensor 'b.weight' type", "tensor 'b.weight' offset"}) {
    EXPECT_TRUE(named.contains(field)) << field;
  }
}

TEST(Gguf, RefusesOtherFilesAndVersions) {
  expect_contains(gguf_error(std::string("")), {"x.gguf: magic: found an empty file"});
  expect_contains(gguf_error(std::string("GGML\3\0\0\0", 8)),
                  {"x.gguf: magic: found 'GGML', expected 'GGUF'"});
  GgufBuilder file = gguf_example();
  file.version = 1;
  expect_contains(gguf_error(file), {"x.gguf: version: found 1, expected 2 or 3"});
  file.version = 4;
  expect_contains(gguf_error(file), {"version: found 4"});
  file.version = 0x03000000;
  expect_contains(gguf_error(file), {"version: found 0x03000000", "big-endian"});
}

TEST(Gguf, RefusesCountsTheFileCannotHold) {
  for (const uint64_t count : {uint64_t{1000}, uint64_t{1} << 32, uint64_t{1} << 61, ~uint64_t{0}}) {
    const std::string found = "found " + std::to_string(count) + ", expected at most";
    GgufBuilder file = gguf_example();
    file.tensor_count = count;
    expect_contains(gguf_error(file), {"x.gguf: tensor count: " + found});
    file = gguf_example();
    file.metadata_count = count;
    expect_contains(gguf_error(file), {"x.gguf: metadata count: " + found});
    expect_contains(gguf_error(GgufBuilder().array("k", GgufType::kString, count, {gguf_string("")})),
                    {"metadata 'k' array length: " + found});
    expect_contains(gguf_error(GgufBuilder().array("k", GgufType::kInt64, count, {raw<int64_t>(0)})),
                    {"metadata 'k' array length: " + found});
    expect_contains(gguf_error(GgufBuilder().array("k", GgufType::kString, 1, {raw(count)})),
                    {"metadata 'k' element 0 length: " + found});
    expect_contains(gguf_error(GgufBuilder().value("k", GgufType::kString, raw(count))),
                    {"metadata 'k' length: " + found});
  }
}

TEST(Gguf, RefusesBadMetadata) {
  expect_contains(gguf_error(GgufBuilder().value("k", static_cast<GgufType>(13), raw<uint64_t>(0))),
                  {"metadata 'k' type: found 13, expected 0 to 12"});
  expect_contains(gguf_error(GgufBuilder().value("k", GgufType::kBool, raw<uint8_t>(2))),
                  {"metadata 'k': found 2, expected a bool"});
  expect_contains(gguf_error(GgufBuilder().u32("k", 1).u32("k", 2)),
                  {"metadata 'k': found the key a second time"});
  expect_contains(gguf_error(GgufBuilder().u32("", 1)), {"metadata 0 key: found an empty key"});
  expect_contains(
      gguf_error(GgufBuilder().array("k", GgufType::kArray, 1, {raw<uint32_t>(0), raw<uint64_t>(0)})),
      {"metadata 'k' array type: found an array of arrays"});
  expect_contains(gguf_error(GgufBuilder().array("k", GgufType::kUint64, 1, {raw(~uint64_t{0})})),
                  {"metadata 'k' element 0: found 18446744073709551615, expected at most"});
  // A key with a line break in it still gives one line.
  expect_contains(gguf_error(GgufBuilder().value("a\nb", GgufType::kBool, raw<uint8_t>(2))),
                  {"metadata 'a\\x0ab'"});
}

TEST(Gguf, RefusesBadTensors) {
  const auto with = [](const std::vector<uint64_t>& dims, uint32_t type, uint64_t offset) {
    GgufBuilder file;
    file.tensor("t", dims, type, offset).data(std::string(64, 'd'));
    return gguf_error(file);
  };
  expect_contains(with({1, 1, 1, 1, 1}, kF32, 0), {"x.gguf: tensor 't' rank: found 5, expected at most 4"});
  expect_contains(with({4, 0}, kF32, 0), {"tensor 't' dimension 1: found 0, expected at least 1"});
  expect_contains(with({uint64_t{1} << 63}, kF32, 0), {"tensor 't' dimension 0: found 9223372036854775808"});
  expect_contains(with({uint64_t{1} << 32, uint64_t{1} << 31}, kF32, 0),
                  {"tensor 't' dimension 1: found 2147483648"});
  expect_contains(with({uint64_t{1} << 62}, kF32, 0),
                  {"tensor 't' shape: found 4611686018427387904 elements of f32"});
  expect_contains(with({33}, kQ4_0, 0),
                  {"tensor 't' shape: found rows of 33 elements, expected a multiple of 32 for q4_0"});
  expect_contains(with({4}, 9, 0), {"tensor 't' type: found 9 (Q8_1), which is not supported", "MXFP4 39"});
  expect_contains(with({4}, 4, 0), {"tensor 't' type: found 4, an unknown type", "F32 0, F16 1"});
  expect_contains(with({4}, 4000000000u, 0), {"tensor 't' type: found 4000000000, an unknown type"});
  expect_contains(with({4}, kF32, 8), {"tensor 't' offset: found 8, expected a multiple of 32"});
  expect_contains(with({4}, kF32, ~uint64_t{31}),
                  {"tensor 't' offset: found 18446744073709551584, expected less than"});
  expect_contains(with({9}, kF32, 32),
                  {"tensor 't' data: found its end at byte", "expected it within the file's"});
  expect_contains(with({17}, kF32, 0), {"tensor 't' data: found its end at byte"});
}

TEST(Gguf, RefusesOverlappingAndRepeatedTensors) {
  const std::string data(128, 'd');
  GgufBuilder overlapping;
  overlapping.tensor("b", {8}, kF32, 32).tensor("a", {9}, kF32, 0).data(data);
  expect_contains(gguf_error(overlapping),
                  {"x.gguf: tensor 'b' offset: found 32, inside tensor 'a', expected 36 or more"});
  GgufBuilder same;
  same.tensor("a", {8}, kF32, 0).tensor("b", {8}, kF32, 0).data(data);
  expect_contains(gguf_error(same), {"offset: found 0, inside tensor"});
  GgufBuilder twice;
  twice.tensor("a", {8}, kF32, 0).tensor("a", {8}, kF32, 32).data(data);
  expect_contains(gguf_error(twice), {"tensor 'a': found the name a second time"});
  GgufBuilder unnamed;
  unnamed.tensor("", {8}, kF32, 0).data(data);
  expect_contains(gguf_error(unnamed), {"tensor 0 name: found an empty name"});
}

TEST(Gguf, TypedAccessSaysWhatIsWrong) {
  const Buffer buffer(gguf_example().build());
  const Gguf gguf = Gguf::parse(buffer.bytes(), "x.gguf");
  EXPECT_EQ(gguf.get_int("absent", 5), 5);
  EXPECT_EQ(gguf.get_string("absent", "f"), "f");
  EXPECT_EQ(gguf.get_array("absent"), nullptr);
  EXPECT_FALSE(gguf.has("absent"));
  const auto error = [](auto action) { return message_of(action); };
  expect_contains(error([&] { gguf.get_int("absent"); }),
                  {"x.gguf: metadata 'absent': found nothing, expected the key"});
  expect_contains(error([&] { gguf.get_int("a.u64"); }), {"metadata 'a.u64': found 18446744073709551615"});
  expect_contains(error([&] { gguf.get_int("a.f32", 1); }),
                  {"'a.f32': found a real number, expected an integer"});
  expect_contains(error([&] { gguf.get_real("a.bool"); }), {"'a.bool': found a bool, expected a number"});
  expect_contains(error([&] { gguf.get_bool("a.u8", true); }),
                  {"found an unsigned integer, expected a bool"});
  expect_contains(error([&] { gguf.get_string("tokens"); }), {"found an array, expected a string"});
  expect_contains(error([&] { gguf.get_array("a.i8"); }), {"found an integer, expected an array"});
}

// Two parts, one tensor each.
std::string split_part(int no, int count, const std::string& tensor, int total = 2) {
  GgufBuilder file;
  file.value("split.no", GgufType::kUint16, raw(static_cast<uint16_t>(no)))
      .value("split.count", GgufType::kUint16, raw(static_cast<uint16_t>(count)))
      .value("split.tensors.count", GgufType::kInt32, raw<int32_t>(total));
  if (no == 0) file.string("general.architecture", "llama");
  file.tensor(tensor, {2}, kF32, 0).data(std::string(8, static_cast<char>('0' + no)));
  return file.build();
}

TEST(GgufSplit, AnyPartOpensTheFamily) {
  const TempDir dir;
  const std::string first = dir.write("m-00001-of-00002.gguf", split_part(0, 2, "a"));
  const std::string second = dir.write("m-00002-of-00002.gguf", split_part(1, 2, "b"));
  for (const std::string& path : {first, second}) {
    const Gguf gguf = Gguf::open(path);
    EXPECT_EQ(gguf.get_string("general.architecture"), "llama");
    ASSERT_EQ(gguf.tensors().size(), 2u);
    EXPECT_EQ(static_cast<char>(*gguf.find_tensor("a")->data), '0');
    EXPECT_EQ(static_cast<char>(*gguf.find_tensor("b")->data), '1');
    EXPECT_EQ(gguf.mapped_bytes(), std::filesystem::file_size(first) + std::filesystem::file_size(second));
  }
}

TEST(GgufSplit, RefusesAnIncompleteOrMixedFamily) {
  const TempDir dir;
  const std::string first = dir.write("m-00001-of-00002.gguf", split_part(0, 2, "a"));
  const auto error = [&] { return message_of([&] { Gguf::open(first); }); };
  expect_contains(error(), {first, "'split.count': found 2 parts but not", "m-00002-of-00002.gguf"});
  dir.write("m-00002-of-00002.gguf", split_part(0, 2, "b"));
  expect_contains(error(),
                  {"m-00002-of-00002.gguf: metadata 'split.no': found part 1 of 2, expected part 2 of 2"});
  dir.write("m-00002-of-00002.gguf", split_part(1, 2, "a"));
  expect_contains(error(), {"m-00002-of-00002.gguf: tensor 'a': found the name in an earlier part too"});
  dir.write("m-00002-of-00002.gguf", GgufBuilder().build());
  expect_contains(error(), {"found part 1 of 1, expected part 2 of 2"});
  dir.write("m-00002-of-00002.gguf", split_part(1, 2, "b"));
  dir.write("m-00001-of-00002.gguf", split_part(0, 2, "a", 3));
  expect_contains(error(), {"'split.tensors.count': found 3, expected the 2 tensors"});
  const std::string renamed = dir.write("m.gguf", split_part(0, 2, "a"));
  expect_contains(message_of([&] { Gguf::open(renamed); }),
                  {"expected a file name that ends in -00001-of-00002.gguf"});
  const std::string beyond = dir.write("m-00004-of-00002.gguf", split_part(3, 2, "a"));
  expect_contains(message_of([&] { Gguf::open(beyond); }), {"'split.no': found 3, expected 0 to 1"});
}

TEST(Gguf, OpenNamesAMissingFile) {
  expect_contains(message_of([] { Gguf::open("/nonexistent/m.gguf"); }),
                  {"/nonexistent/m.gguf: cannot open: No such file"});
}

// A file from the wild, when `make run` has fetched it.
TEST(Gguf, ReadsSmolLM2WhenPresent) {
  const char* path = "build/models/SmolLM2-135M-Instruct.Q4_1.gguf";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not there: 'make run' fetches it";
  const Gguf gguf = Gguf::open(path);
  EXPECT_EQ(gguf.get_string("general.architecture"), "llama");
  EXPECT_EQ(gguf.get_int("llama.block_count"), 30);
  EXPECT_EQ(gguf.get_int("llama.embedding_length"), 576);
  EXPECT_EQ(gguf.get_array("tokenizer.ggml.tokens")->strings.size(), 49152u);
  ASSERT_EQ(gguf.tensors().size(), 272u);
  const TensorView* embedding = gguf.find_tensor("token_embd.weight");
  ASSERT_NE(embedding, nullptr);
  EXPECT_EQ(embedding->shape[0], 49152);
  EXPECT_EQ(embedding->shape[1], 576);
}

}  // namespace
}  // namespace millrace::io
