// Every scheme against the values that the published packages give (tests/golden/make_quantized_golden.py),
// to the bit; and what is wrong with a damaged directory, in one line each.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/error.h"
#include "io/hf_directory.h"
#include "kernels/quant/codec.h"
#include "model/quantized_weights/quantized_weight.h"

namespace millrace {
namespace {

namespace fs = std::filesystem;
const fs::path kGolden = "tests/golden/quantized";

std::vector<float> values_of(const QuantizedWeight& weight, DType type, int64_t rows, int64_t cols) {
  std::vector<std::byte> bytes(static_cast<size_t>(rows) * bytes_of(type, cols));
  // In pieces that are no multiple of anything.
  for (int64_t r = 0; r < rows; r += 5) {
    weight.rows->read(type, r, std::min<int64_t>(5, rows - r),
                      bytes.data() + static_cast<size_t>(r) * bytes_of(type, cols));
  }
  std::vector<float> values(static_cast<size_t>(rows * cols));
  quant::dequantize(type, bytes.data(), values.data(), rows * cols);
  return values;
}

TEST(QuantizedWeights, EverySchemeHasTheValuesOfItsPackage) {
  int weights = 0;
  for (const auto& entry : fs::directory_iterator(kGolden)) {
    const io::Checkpoint checkpoint = io::Checkpoint::open(entry.path().string());
    for (const auto& [module, type] : checkpoint.hf->config["expected_types"].items()) {
      SCOPED_TRACE(entry.path().string() + " " + module);
      const TensorView* expected = checkpoint.find_tensor(module + ".expected");
      ASSERT_NE(expected, nullptr);
      const auto found =
          find_quantized(checkpoint, module + ".weight", expected->shape[0], expected->shape[1]);
      ASSERT_TRUE(found.has_value());
      EXPECT_TRUE(has_weight(checkpoint, module + ".weight"));
      EXPECT_EQ(info(found->type).name, type.get<std::string>());
      std::vector<float> want(static_cast<size_t>(expected->elements()));
      std::memcpy(want.data(), expected->data, want.size() * sizeof(float));
      for (const DType as : {found->type, DType::kF32}) {
        const std::vector<float> got = values_of(*found, as, expected->shape[0], expected->shape[1]);
        // Equal as numbers: a zero may have either sign.
        for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(got[i], want[i]) << info(as).name << " at " << i;
      }
      ++weights;
    }
  }
  EXPECT_GE(weights, 30);
}

// A copy of a golden directory whose config.json was changed.
io::Checkpoint changed(const std::string& scheme, const fs::path& to,
                       const std::function<void(nlohmann::json&)>& change) {
  fs::create_directories(to);
  fs::copy_file(kGolden / scheme / "model.safetensors", to / "model.safetensors",
                fs::copy_options::overwrite_existing);
  std::ifstream in(kGolden / scheme / "config.json");
  nlohmann::json config = nlohmann::json::parse(in);
  change(config["quantization_config"]);
  std::ofstream(to / "config.json") << config;
  return io::Checkpoint::open(to.string());
}

// The same with a name in the header of the weights overwritten by another of its length.
io::Checkpoint renamed(const std::string& scheme, const fs::path& to, const std::string& from,
                       const std::string& name) {
  fs::create_directories(to);
  fs::copy_file(kGolden / scheme / "config.json", to / "config.json", fs::copy_options::overwrite_existing);
  std::ifstream in(kGolden / scheme / "model.safetensors", std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const size_t at = bytes.find('"' + from + '"');
  EXPECT_NE(at, std::string::npos) << from;
  EXPECT_EQ(from.size(), name.size());
  bytes.replace(at + 1, name.size(), name);
  std::ofstream(to / "model.safetensors", std::ios::binary) << bytes;
  return io::Checkpoint::open(to.string());
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

class BadQuantizedWeights : public testing::Test {
 protected:
  void TearDown() override { fs::remove_all(folder_); }
  std::string missing(const std::string& scheme, const std::string& module, const std::string& part) {
    const std::string name = module + "." + part;
    const io::Checkpoint checkpoint = renamed(scheme, folder_, name, std::string(name.size() - 1, 'x') + "y");
    return error_of([&] { find_quantized(checkpoint, module + ".weight", 16, 128); });
  }
  std::string of_shape(const std::string& scheme, const std::string& module, int64_t rows, int64_t cols) {
    const io::Checkpoint checkpoint = io::Checkpoint::open((kGolden / scheme).string());
    return error_of([&] { find_quantized(checkpoint, module + ".weight", rows, cols); });
  }
  std::string config(const std::string& scheme, const std::function<void(nlohmann::json&)>& change) {
    const io::Checkpoint checkpoint = changed(scheme, folder_, change);
    return error_of([&] { check_quantization(checkpoint); });
  }
  fs::path folder_ =
      fs::temp_directory_path() / ("millrace-quantized-" + std::to_string(::getpid()) + "-" +
                                   testing::UnitTest::GetInstance()->current_test_info()->name());
};

void expect_line(const std::string& line, std::initializer_list<const char*> pieces) {
  EXPECT_EQ(line.find('\n'), std::string::npos) << line;
  for (const char* piece : pieces)
    EXPECT_NE(line.find(piece), std::string::npos) << line << " without " << piece;
}

TEST_F(BadQuantizedWeights, MissingPartsAreNamed) {
  expect_line(missing("gptq", "sym4", "scales"), {"tensor sym4.scales", "found nothing", "F16"});
  expect_line(missing("gptq", "asym8", "qzeros"), {"tensor asym8.qzeros", "found nothing"});
  expect_line(missing("awq", "plain", "qzeros"), {"tensor plain.qzeros", "found nothing"});
  expect_line(missing("compressed", "int4", "weight_scale"), {"tensor int4.weight_scale", "found nothing"});
  expect_line(missing("compressed", "nvfp4", "weight_global_scale"),
              {"nvfp4.weight_global_scale", "found nothing"});
  expect_line(missing("bitsandbytes", "nf4", "weight.nested_quant_map"), {"nf4.weight.nested_quant_map"});
  expect_line(missing("bitsandbytes", "nf4", "weight.quant_state.bitsandbytes__nf4"),
              {"quant_state", "nothing"});
}

TEST_F(BadQuantizedWeights, WrongShapesAreNamed) {
  expect_line(of_shape("gptq", "sym4", 24, 128), {"tensor sym4.qweight", "found I32 [16, 16]", "24"});
  expect_line(of_shape("gptq", "sym4", 16, 100), {"tensor sym4.qweight", "expected I32"});
  expect_line(of_shape("awq", "plain", 16, 64), {"tensor plain.qweight", "expected I32 [64, 2]"});
  expect_line(of_shape("compressed", "int4", 16, 256), {"int4.weight_shape", "found [16, 128]", "[16, 256]"});
  expect_line(of_shape("compressed", "w8a8", 8, 128), {"tensor w8a8.weight", "expected I8 [8, 128]"});
  expect_line(of_shape("compressed", "nvfp4", 16, 64), {"nvfp4.weight_packed", "expected U8 [16, 32]"});
  expect_line(of_shape("bitsandbytes", "nf4", 128, 16), {"quant_state", "expected [128, 16]"});
}

TEST_F(BadQuantizedWeights, OtherSchemesAreRefused) {
  expect_line(config("gptq", [](auto& c) { c["quant_method"] = "hqq"; }), {"'hqq'", "gptq", "GGUF"});
  expect_line(config("gptq", [](auto& c) { c["checkpoint_format"] = "marlin"; }), {"'marlin'", "gptq_v2"});
  expect_line(config("awq", [](auto& c) { c["version"] = "gemv"; }), {"'gemv'", "gemm"});
  expect_line(config("compressed",
                     [](auto& c) {
                       c["transform_config"] = {{"config_groups", 1}};
                     }),
              {"transform_config", "rotation"});
  EXPECT_EQ(config("compressed", [](auto&) {}), "no error");
}

}  // namespace
}  // namespace millrace
