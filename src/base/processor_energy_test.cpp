#include "base/processor_energy.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace millrace {
namespace {

class Energy : public testing::Test {
 protected:
  Energy() : folder_(testing::TempDir() + "/powercap_" + std::to_string(::getpid())) {}
  ~Energy() override { std::filesystem::remove_all(folder_); }
  void write(const std::string& zone, const std::string& file, const std::string& text) const {
    std::filesystem::create_directories(folder_ + "/" + zone);
    std::ofstream(folder_ + "/" + zone + "/" + file) << text << "\n";
  }
  void make_zone(const std::string& zone, const std::string& name, uint64_t energy) const {
    write(zone, "name", name);
    write(zone, "energy_uj", std::to_string(energy));
    write(zone, "max_energy_range_uj", "10000000");
  }
  const std::string folder_;
};

TEST_F(Energy, IsTheSumOfPackages) {
  make_zone("intel-rapl:0", "package-0", 1'000'000);
  make_zone("intel-rapl:1", "package-1", 2'000'000);
  make_zone("intel-rapl:0:0", "core", 500'000);
  ProcessorEnergy energy(folder_);
  EXPECT_DOUBLE_EQ(energy.joules().value(), 0.0);
  make_zone("intel-rapl:0", "package-0", 1'500'000);
  make_zone("intel-rapl:1", "package-1", 4'000'000);
  make_zone("intel-rapl:0:0", "core", 700'000);
  EXPECT_DOUBLE_EQ(energy.joules().value(), 2.5);
}

TEST_F(Energy, GoesOnWhenACounterBeginsAgain) {
  make_zone("intel-rapl:0", "package-0", 9'000'000);
  ProcessorEnergy energy(folder_);
  make_zone("intel-rapl:0", "package-0", 250'000);
  EXPECT_DOUBLE_EQ(energy.joules().value(), 1.25);
}

TEST_F(Energy, IsNothingWithoutACounter) {
  EXPECT_EQ(ProcessorEnergy(folder_).joules(), std::nullopt);  // no such folder
  make_zone("intel-rapl:0:0", "core", 1);
  EXPECT_EQ(ProcessorEnergy(folder_).joules(), std::nullopt);
  make_zone("intel-rapl:0", "package-0", 1);
  write("intel-rapl:0", "energy_uj", "");
  EXPECT_EQ(ProcessorEnergy(folder_).joules(), std::nullopt);
}

}  // namespace
}  // namespace millrace
