// What the writers write is read back, by our reader or (for .npy) byte by byte; short and long data are
// refused and leave no file.
#include "io/gguf_writer.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>

#include "io/gguf.h"
#include "io/npy_writer.h"
#include "io/test_files.h"

namespace millrace::io {
namespace {

using testing::message_of;
using testing::TempDir;

constexpr std::array<int64_t, 2> kShape = {3, 5};        // 60 bytes of F32
constexpr std::array<int64_t, 3> kBlocked = {2, 1, 32};  // 34 bytes of MXFP4

TEST(GgufWriter, CopiesMetadataTypeAndAll) {
  const TempDir dir;
  const std::string path = dir.path() + "/a.gguf", copy_path = dir.path() + "/b.gguf";
  GgufWriter writer(path);
  writer.set_u32("a.u32", 7);
  writer.set_strings("a.strings", std::array<std::string, 2>{"x", ""});
  writer.commit();
  const Gguf gguf = Gguf::open(path);
  ASSERT_EQ(gguf.raw_metadata().size(), 2u);
  GgufWriter copy(copy_path);
  for (const GgufRawValue& value : gguf.raw_metadata()) copy.copy_value(value.key, value.bytes);
  EXPECT_THROW(copy.copy_value("a.u32", gguf.raw_metadata()[0].bytes), Error);
  copy.commit();
  const MappedFile a(path), b(copy_path);
  EXPECT_TRUE(std::equal(a.bytes().begin(), a.bytes().end(), b.bytes().begin(), b.bytes().end()));
}

TEST(GgufWriter, RoundTrip) {
  const TempDir dir;
  const std::string path = dir.path() + "/m.gguf";
  std::vector<float> values(15);
  std::iota(values.begin(), values.end(), 1.0f);
  const std::string blocks(34, 'q');
  GgufWriter writer(path, 64);
  writer.set_string("general.architecture", "llama");
  writer.set_u32("a.u32", 4000000000u);
  writer.set_i32("a.i32", -4);
  writer.set_u64("a.u64", uint64_t{1} << 40);
  writer.set_f32("a.f32", 0.25f);
  writer.set_bool("a.bool", true);
  writer.set_bools("a.bools", {true, false});
  writer.set_i32s("a.i32s", std::array<int32_t, 2>{-1, 2});
  writer.set_f32s("a.f32s", std::array<float, 2>{-1.5f, 2.0f});
  writer.set_strings("a.strings", std::array<std::string, 2>{"x", ""});
  writer.add_tensor("a", DType::kF32, kShape);
  writer.add_tensor("b", DType::kMXFP4, kBlocked);
  writer.add_tensor("c", DType::kF32, {});
  const uint64_t file_bytes = writer.file_bytes();
  writer.write(values.data(), 20);
  writer.write(values.data() + 5, 40);
  writer.write(blocks.data(), blocks.size());
  EXPECT_EQ(dir.num_files(), 0u);  // no name before commit()
  writer.write(values.data(), 4);
  writer.commit();
  EXPECT_EQ(std::filesystem::file_size(path), file_bytes);
  EXPECT_EQ(dir.num_files(), 1u);

  const Gguf gguf = Gguf::open(path);
  EXPECT_EQ(gguf.get_string("general.architecture"), "llama");
  EXPECT_EQ(gguf.get_int("a.u32"), 4000000000);
  EXPECT_EQ(gguf.get_int("a.i32"), -4);
  EXPECT_EQ(gguf.get_int("a.u64"), int64_t{1} << 40);
  EXPECT_EQ(gguf.get_real("a.f32"), 0.25);
  EXPECT_TRUE(gguf.get_bool("a.bool", false));
  EXPECT_EQ(gguf.get_array("a.bools")->integers, (std::vector<int64_t>{1, 0}));
  EXPECT_EQ(gguf.get_array("a.i32s")->integers, (std::vector<int64_t>{-1, 2}));
  EXPECT_EQ(gguf.get_array("a.f32s")->reals, (std::vector<double>{-1.5, 2.0}));
  EXPECT_EQ(gguf.get_array("a.strings")->strings, (std::vector<std::string_view>{"x", ""}));
  const TensorView* a = gguf.find_tensor("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->shape[0], 3);
  EXPECT_EQ(a->shape[1], 5);
  EXPECT_EQ(std::memcmp(a->data, values.data(), 60), 0);
  const TensorView* b = gguf.find_tensor("b");
  EXPECT_EQ(b->type, DType::kMXFP4);
  EXPECT_EQ(b->shape[2], 32);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b->data) % 64, 0u);
  EXPECT_EQ(std::memcmp(b->data, blocks.data(), 34), 0);
  EXPECT_EQ(gguf.find_tensor("c")->rank, 0);
}

TEST(GgufWriter, RefusesTooFewAndTooManyBytes) {
  const TempDir dir;
  const std::string zeros(100, '\0');
  {
    GgufWriter writer(dir.path() + "/m.gguf");
    writer.add_tensor("a", DType::kF32, kShape);
    writer.write(zeros.data(), 59);
    EXPECT_NE(message_of([&] {
                writer.write(zeros.data(), 2);
              }).find("m.gguf: tensor 'a' data: found 61 bytes, expected 60"),
              std::string::npos);
    EXPECT_NE(message_of([&] { writer.commit(); }).find("tensor 'a' data: found 59 bytes, expected 60"),
              std::string::npos);
    writer.write(zeros.data(), 1);
    EXPECT_NE(message_of([&] { writer.write(zeros.data(), 1); }).find("after the last tensor"),
              std::string::npos);
    EXPECT_NE(message_of([&] { writer.set_bool("late", true); }).find("after the first data"),
              std::string::npos);
  }
  EXPECT_EQ(dir.num_files(), 0u);
}

TEST(GgufWriter, RefusesBadDeclarations) {
  const TempDir dir;
  GgufWriter writer(dir.path() + "/m.gguf");
  writer.set_bool("k", true);
  writer.add_tensor("a", DType::kF32, kShape);
  const auto error = [&](std::string_view name, DType type, std::vector<int64_t> shape) {
    return message_of([&] { writer.add_tensor(name, type, shape); });
  };
  EXPECT_NE(message_of([&] { writer.set_u32("k", 1); }).find("metadata 'k'"), std::string::npos);
  EXPECT_NE(error("a", DType::kF32, {1}).find("tensor 'a' name"), std::string::npos);
  EXPECT_NE(error("b", DType::kF8E4M3, {32}).find("type: found f8_e4m3, expected one of F32 0"),
            std::string::npos);
  EXPECT_NE(error("b", DType::kQ4_K, {32}).find("rows of 32 elements, expected a multiple of 256"),
            std::string::npos);
  EXPECT_NE(error("b", DType::kF32, {0}).find("dimension of 0"), std::string::npos);
  EXPECT_NE(error("b", DType::kF32, {int64_t{1} << 32, int64_t{1} << 30}).find("product"), std::string::npos);
  EXPECT_NE(error("b", DType::kF32, {1, 1, 1, 1, 1}).find("rank: found 5"), std::string::npos);
  EXPECT_NE(message_of([&] { GgufWriter(dir.path() + "/n.gguf", 4); }).find("general.alignment: found 4"),
            std::string::npos);
}

TEST(NpyWriter, WritesTheFormat) {
  const TempDir dir;
  const std::string path = dir.path() + "/x.npy";
  const std::array<float, 6> values = {1, 2, 3, 4, 5, -6.5f};
  NpyWriter writer(path, 3, 2);
  writer.write_rows(values.data(), 1);
  EXPECT_NE(message_of([&] { writer.commit(); }).find("x.npy: rows: found 1, expected 3"), std::string::npos);
  EXPECT_NE(message_of([&] { writer.write_rows(values.data(), 3); }).find("rows: found 4, expected 3"),
            std::string::npos);
  writer.write_rows(values.data() + 2, 2);
  EXPECT_EQ(dir.num_files(), 0u);
  writer.commit();
  const std::string bytes = read_text_file(path);
  ASSERT_EQ(bytes.size(), 128u + 24u);
  EXPECT_EQ(bytes.substr(0, 8), std::string("\x93NUMPY\x01\x00", 8));
  EXPECT_EQ(bytes.substr(8, 2), std::string("\x76\x00", 2));  // 128 - 10
  EXPECT_EQ(bytes.substr(10, 59), "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 2), }");
  EXPECT_EQ(bytes[127], '\n');
  EXPECT_EQ(std::memcmp(bytes.data() + 128, values.data(), 24), 0);
  EXPECT_NE(message_of([&] { NpyWriter(dir.path() + "/y.npy", -1, 2); }).find("shape: found [-1, 2]"),
            std::string::npos);
  EXPECT_EQ(dir.num_files(), 1u);
}

}  // namespace
}  // namespace millrace::io
