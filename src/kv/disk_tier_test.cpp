// The disk tier under good and bad conditions: restarts, limits, damaged files, a disk that fails.
#include "kv/disk_tier.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <fstream>
#include <mutex>
#include <numeric>
#include <random>

#include "base/error.h"
#include "kv/compressor.h"
#include "kv/test_model.h"

namespace millrace::kv {
namespace {

namespace fs = std::filesystem;

// The machine's file system with one operation that fails from its n-th call on.
class FaultyFiles final : public FileSystem {
 public:
  enum class Operation { kNone, kWrite, kRead, kRename, kRemove };
  FaultyFiles(Operation operation, int after, int reason)
      : operation_(operation), left_(after), reason_(reason) {}

  int make_directory(const std::string& path) override { return real_.make_directory(path); }
  int list(const std::string& directory, std::vector<FileEntry>& entries) override {
    return real_.list(directory, entries);
  }
  int write(const std::string& path, std::span<const std::span<const std::byte>> parts) override {
    if (!fails(Operation::kWrite)) return real_.write(path, parts);
    const std::span<const std::byte> half[] = {parts[0], parts[1].first(parts[1].size() / 2)};
    real_.write(path, half);
    return reason_;
  }
  int read(const std::string& path, std::vector<std::byte>& to, size_t limit) override {
    return fails(Operation::kRead) ? reason_ : real_.read(path, to, limit);
  }
  int rename(const std::string& from, const std::string& to) override {
    return fails(Operation::kRename) ? reason_ : real_.rename(from, to);
  }
  int remove(const std::string& path) override {
    return fails(Operation::kRemove) ? reason_ : real_.remove(path);
  }
  int touch(const std::string& path) override { return real_.touch(path); }
  int lock(const std::string& path, std::shared_ptr<void>& lock, std::string& holder) override {
    return real_.lock(path, lock, holder);
  }

 private:
  bool fails(Operation operation) { return operation == operation_ && left_-- <= 0; }
  FileSystem& real_ = real_file_system();
  const Operation operation_;
  std::atomic<int> left_;
  const int reason_;
};

class Log {
 public:
  std::function<void(const std::string&)> writer() {
    return [this](const std::string& line) {
      const std::lock_guard lock(mutex_);
      lines_.push_back(line);
    };
  }
  std::vector<std::string> lines() const {
    const std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

class DiskTest : public testing::Test {
 protected:
  CacheOptions options() {
    CacheOptions o;
    o.groups = groups;
    o.identity = "test";
    o.disk_directory = directory.path();
    o.disk_bytes = 1 << 20;
    o.log = log.writer();
    return o;
  }
  // Computes a prompt and lets its blocks reach the disk.
  void remember(const CacheOptions& o, const std::vector<int32_t>& tokens) {
    Cache cache(o, store);
    run(cache, tokens);
    cache.flush();
    cache.check_invariants();
  }
  // Runs a prompt to its end, checking all bytes on the way; how much of it was found.
  int32_t run(Cache& cache, const std::vector<int32_t>& tokens) {
    TestStream s;
    s.tokens = tokens;
    s.sequence = cache.attach(cache.make_prompt(tokens));
    cache.check_invariants();
    while (!cache.ready(s.sequence)) cache.wait(std::chrono::milliseconds(100));
    const int32_t found = s.sequence.length();
    EXPECT_TRUE(test_run(cache, store, groups, s));
    cache.check_invariants();
    return found;
  }
  std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(directory.path())) {
      if (entry.path().extension() == ".kv1") found.push_back(entry.path());
    }
    std::sort(found.begin(), found.end());
    return found;
  }
  void make_older() const {
    for (const fs::path& path : files()) {
      fs::last_write_time(path, fs::last_write_time(path) - std::chrono::hours(1));
    }
  }
  uint64_t bytes_on_disk() const {
    uint64_t bytes = 0;
    for (const fs::path& path : files()) bytes += fs::file_size(path);
    return bytes;
  }

  std::vector<GroupOptions> groups = {{0, 100, kTestBlockBytes}};
  TestStore store{groups};
  TestDirectory directory;
  Log log;
};

TEST_F(DiskTest, ServesTheSamePromptAfterARestart) {
  const std::vector<int32_t> tokens = counting(0, 200);
  remember(options(), tokens);
  EXPECT_EQ(files().size(), 12u);
  Cache cache(options(), store);
  const Match match = cache.match(*cache.make_prompt(tokens));
  EXPECT_EQ(match.tokens, 192);
  EXPECT_EQ(match.from_disk, 192);
  EXPECT_EQ(run(cache, tokens), 192);
  EXPECT_EQ(cache.stats().disk.hits, 12u);
  EXPECT_GT(cache.stats().disk.bytes_read, 12 * kTestBlockBytes);
  EXPECT_EQ(run(cache, counting(7, 200)), 0) << "other tokens";
  EXPECT_TRUE(log.lines().empty());
}

TEST_F(DiskTest, WindowTailsComeBackToo) {
  groups = {{64, 100, kTestBlockBytes}, {0, 100, kTestBlockBytes}};
  store = TestStore(groups);
  const std::vector<int32_t> tokens = counting(0, 333);
  remember(options(), tokens);
  EXPECT_LT(files().size(), 20u + 15u) << "20 full blocks, and window blocks for few boundaries";
  Cache cache(options(), store);
  EXPECT_EQ(run(cache, tokens), 320);
}

TEST_F(DiskTest, AnotherIdentityFindsNothingAndRemovesNothing) {
  const std::vector<int32_t> tokens = counting(0, 100);
  remember(options(), tokens);
  CacheOptions other = options();
  other.identity = "another model";
  {
    Cache cache(other, store);
    EXPECT_EQ(run(cache, tokens), 0);
  }
  Cache cache(options(), store);
  EXPECT_EQ(run(cache, tokens), 96);
}

TEST_F(DiskTest, StaysBelowItsSizeAndForgetsTheLeastRecent) {
  CacheOptions o = options();
  o.disk_bytes = 30 * (kTestBlockBytes + kFileHeaderBytes);
  o.compression = Compression::kOff;
  remember(o, counting(0, 160));
  make_older();
  remember(o, counting(1000, 160));
  make_older();
  {
    Cache cache(o, store);
    EXPECT_EQ(run(cache, counting(0, 160)), 159) << "used again: now the most recent";
  }
  remember(o, counting(2000, 320));  // 20 blocks: something must go
  EXPECT_LE(bytes_on_disk(), o.disk_bytes);
  Cache cache(o, store);
  EXPECT_EQ(run(cache, counting(0, 160)), 159);
  EXPECT_LT(run(cache, counting(1000, 160)), 144);
  EXPECT_GT(cache.stats().disk.blocks, 20);
}

TEST_F(DiskTest, ShrinksToASmallerLimitAtTheStart) {
  remember(options(), counting(0, 320));
  CacheOptions o = options();
  o.disk_bytes = 5 * (kTestBlockBytes + kFileHeaderBytes);
  {
    Cache cache(o, store);
    cache.check_invariants();
    EXPECT_LE(cache.stats().disk.bytes, o.disk_bytes);
    cache.attach(cache.make_prompt(counting(0, 320)));
    cache.flush();
  }
}

// ---------------------------------------------------------------- files that are not what they should be

struct Damage {
  const char* name;
  std::function<void(const fs::path& victim, const fs::path& other)> apply;
  const char* message;
};

void overwrite(const fs::path& path, std::streamoff at, char flip) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const char old = static_cast<char>(file.get());
  file.seekp(at);
  file.put(static_cast<char>(old ^ flip));
}

TEST_F(DiskTest, DamagedFilesAreDroppedWithOneLineAndNeverUsed) {
  const Damage damages[] = {
      {"magic", [](auto& victim, auto&) { overwrite(victim, 0, 1); }, "magic"},
      {"version", [](auto& victim, auto&) { overwrite(victim, 8, 3); }, "version: found 2, expected 1"},
      {"key", [](auto& victim, auto&) { overwrite(victim, 20, 1); }, "header checksum"},
      {"tokens", [](auto& victim, auto&) { overwrite(victim, 90, 1); }, "header checksum"},
      {"payload", [](auto& victim, auto&) { overwrite(victim, 200, 1); }, "payload checksum"},
      {"cut payload", [](auto& victim, auto&) { fs::resize_file(victim, 250); }, "payload: found 74 bytes"},
      {"cut header", [](auto& victim, auto&) { fs::resize_file(victim, 100); }, "size: found 100 bytes"},
      {"empty", [](auto& victim, auto&) { fs::resize_file(victim, 0); }, "size: found 0 bytes"},
      {"long", [](auto& victim, auto&) { fs::resize_file(victim, 100000); }, "longer than its block"},
      {"another's",
       [](auto& victim, auto& other) {
         fs::remove(victim);
         fs::copy_file(other, victim);
       },
       "name: found another block's"},
      {"gone", [](auto& victim, auto&) { fs::remove(victim); }, "the file is gone"},
  };
  CacheOptions o = options();
  o.compression = Compression::kOff;
  const std::vector<int32_t> tokens = counting(0, 200);
  size_t lines = 0;
  for (const Damage& damage : damages) {
    SCOPED_TRACE(damage.name);
    for (const fs::path& path : files()) fs::remove(path);
    remember(o, tokens);
    Cache cache(o, store);
    const BlockKey third = cache.make_prompt(tokens)->keys[3];
    const fs::path victim = directory.path() + "/" + file_name(third, 0, 3);
    const fs::path other = directory.path() + "/" + file_name(cache.make_prompt(tokens)->keys[4], 0, 4);
    ASSERT_TRUE(fs::exists(victim));
    damage.apply(victim, other);
    EXPECT_EQ(run(cache, tokens), 48) << "up to the damage";
    ASSERT_EQ(log.lines().size(), ++lines);
    EXPECT_NE(log.lines().back().find(damage.message), std::string::npos) << log.lines().back();
    EXPECT_NE(log.lines().back().find(victim.filename().string()), std::string::npos);
    EXPECT_EQ(cache.stats().files_dropped, 1u);
    EXPECT_TRUE(cache.stats().disk_on);
    cache.flush();
    EXPECT_TRUE(fs::exists(victim)) << "computed again, written again";
  }
}

TEST_F(DiskTest, SecondSequenceThatWaitsForADamagedBlockRecoversToo) {
  const std::vector<int32_t> tokens = counting(0, 200);
  remember(options(), tokens);
  Cache cache(options(), store);
  overwrite(directory.path() + "/" + file_name(cache.make_prompt(tokens)->keys[5], 0, 5), 180, 1);
  TestStream a, b;
  a.tokens = b.tokens = tokens;
  a.sequence = cache.attach(cache.make_prompt(tokens));
  b.sequence = cache.attach(cache.make_prompt(tokens));
  EXPECT_EQ(b.sequence.length(), 192);
  EXPECT_TRUE(test_run(cache, store, groups, a));
  EXPECT_TRUE(test_run(cache, store, groups, b));
  EXPECT_EQ(a.sequence.cached_tokens(), 80);
  EXPECT_GE(b.sequence.cached_tokens(), 80);
  cache.check_invariants();
}

TEST_F(DiskTest, LetsGoOfASequenceThatIsStillLoading) {
  const std::vector<int32_t> tokens = counting(0, 400);
  remember(options(), tokens);
  Cache cache(options(), store);
  for (int i = 0; i < 5; ++i) {
    Sequence s = cache.attach(cache.make_prompt(tokens));
    EXPECT_EQ(s.length(), 399);
    s.reset();
    cache.check_invariants();
  }
  EXPECT_EQ(run(cache, tokens), 399);
}

TEST_F(DiskTest, ATailIsReadFromDiskAndCopied) {
  Cache cache(options(), store);
  run(cache, counting(0, 160));
  cache.flush();
  cache.evict(0, 1000);
  std::vector<int32_t> tokens = counting(0, 155);  // eleven tokens into the last block
  tokens.push_back(9999);
  EXPECT_EQ(run(cache, tokens), 155);
  EXPECT_EQ(cache.stats().disk.hit_tokens, 155u);
  EXPECT_EQ(run(cache, counting(0, 160)), 159) << "the block itself is as it was";
}

TEST_F(DiskTest, AfterARestartAHitEndsWhereItDidBefore) {
  // Two that part inside the tenth block, one that parts before it and one that nothing is told about.
  std::vector<int32_t> other = counting(0, 160), third = counting(0, 160);
  for (int32_t i = 148; i < 160; ++i) other[i] = 5000 + i;
  for (int32_t i = 40; i < 160; ++i) third[i] = 6000 + i;
  for (const auto& tokens : {other, counting(0, 160), third, counting(7000, 160)})
    remember(options(), tokens);
  std::vector<int32_t> tokens = counting(0, 155);  // eleven tokens into the last block
  tokens.push_back(9999);
  constexpr uint64_t kFile = kTestBlockBytes + kFileHeaderBytes;

  CacheOptions o = options();
  o.compression = Compression::kOff;
  for (const fs::path& path : files()) ASSERT_EQ(fs::file_size(path), kFile);
  Cache cache(o, store);
  EXPECT_EQ(run(cache, tokens), 155);
  const CacheStats stats = cache.stats();
  EXPECT_EQ(stats.disk.hits, 10u);
  EXPECT_EQ(stats.disk.hit_tokens, 155u);
  EXPECT_EQ(stats.hit_tokens, 155u);
  // Ten blocks, and of four tenth blocks what they begin with.
  EXPECT_EQ(stats.disk.bytes_read, 10 * kFile + 4 * kFileHeaderBytes);
  tokens.back() = 9998;
  EXPECT_EQ(run(cache, tokens), 155);
  EXPECT_EQ(cache.stats().disk.bytes_read, stats.disk.bytes_read) << "once";
  EXPECT_TRUE(log.lines().empty());
}

TEST_F(DiskTest, AfterARestartAStateIsTakenInsideABlockToo) {
  groups = {full(100), state(100), window(64, 100)};
  store = TestStore(groups);
  const std::vector<int32_t> turn = counting(0, 159), told = counting(0, 156);
  const auto next_turn = [&](int32_t first) {
    std::vector<int32_t> tokens = told;
    for (int32_t i = 0; i < 40; ++i) tokens.push_back(first + i);
    return tokens;
  };
  int32_t before = 0;
  {
    Cache cache(options(), store);
    run(cache, told);
    std::vector<int32_t> answered = turn;
    answered.push_back(1);
    run(cache, answered);
    before = run(cache, next_turn(2000));
    cache.flush();
  }
  EXPECT_EQ(before, 156);
  for (int32_t round = 0; round < 2; ++round) {
    Cache cache(options(), store);
    EXPECT_EQ(run(cache, next_turn(3000 + 100 * round)), before);
    cache.flush();
  }
}

TEST_F(DiskTest, AHeaderThatIsDamagedOrGoneCostsTheTokensOfItsBlock) {
  const Damage damages[] = {
      {"tokens", [](auto& victim, auto&) { overwrite(victim, 90, 1); }, ""},
      {"cut", [](auto& victim, auto&) { fs::resize_file(victim, 100); }, ""},
      {"gone", [](auto& victim, auto&) { fs::remove(victim); }, ""},
  };
  std::vector<int32_t> tokens = counting(0, 155);
  tokens.push_back(9999);
  for (const Damage& damage : damages) {
    SCOPED_TRACE(damage.name);
    for (const fs::path& path : files()) fs::remove(path);
    remember(options(), counting(0, 160));
    Cache cache(options(), store);
    const BlockKey last = cache.make_prompt(counting(0, 160))->keys[9];
    damage.apply(directory.path() + "/" + file_name(last, 0, 9), {});
    EXPECT_EQ(run(cache, tokens), 144);
    EXPECT_TRUE(cache.stats().disk_on);
  }
  // A payload that is damaged is seen when the block is read: then the hit is looked up again.
  for (const fs::path& path : files()) fs::remove(path);
  remember(options(), counting(0, 160));
  Cache cache(options(), store);
  const BlockKey last = cache.make_prompt(counting(0, 160))->keys[9];
  overwrite(directory.path() + "/" + file_name(last, 0, 9), 180, 1);
  EXPECT_EQ(run(cache, tokens), 144);
  EXPECT_EQ(log.lines().size(), 1u);
}

TEST_F(DiskTest, StrangersInTheDirectory) {
  remember(options(), counting(0, 100));
  const std::string stale = directory.path() + "/" + std::string(32, 'a') + "-0-7.kv0";
  const std::string partial = directory.path() + "/partial-123-4", foreign = directory.path() + "/diary.txt";
  for (const std::string& path : {stale, partial, foreign}) std::ofstream(path) << "x";
  fs::create_directory(directory.path() + "/folder");
  Cache cache(options(), store);
  EXPECT_FALSE(fs::exists(stale));
  EXPECT_FALSE(fs::exists(partial));
  EXPECT_TRUE(fs::exists(foreign)) << "not ours to remove";
  ASSERT_EQ(log.lines().size(), 1u);
  EXPECT_EQ(log.lines()[0], directory.path() +
                                ": dropped 1 half-written and 1 files of another version; ignoring 1 "
                                "foreign files");
  EXPECT_EQ(run(cache, counting(0, 100)), 96);
}

TEST_F(DiskTest, OneProcessPerDirectory) {
  const Cache cache(options(), store);
  try {
    const Cache second(options(), store);
    FAIL() << "two caches on one directory";
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), directory.path() + ": found in use by process " + std::to_string(::getpid()) +
                                ", expected a directory of its own");
  }
}

TEST_F(DiskTest, DirectoryThatCannotBeMade) {
  std::ofstream(directory.path() + "/file") << "x";
  CacheOptions o = options();
  o.disk_directory = directory.path() + "/file/kv";
  try {
    const Cache cache(o, store);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_EQ(std::string(error.what()).find(o.disk_directory + ": cannot make the directory"), 0u);
  }
}

// ---------------------------------------------------------------- a disk that fails

TEST_F(DiskTest, TurnsItselfOffWhenWritingFailsAndRequestsGoOn) {
  using Operation = FaultyFiles::Operation;
  for (const auto& [operation, reason, message] :
       {std::tuple(Operation::kWrite, ENOSPC, "cannot write: No space left on device"),
        std::tuple(Operation::kWrite, EIO, "cannot write: Input/output error"),
        std::tuple(Operation::kRename, EIO, "cannot write: Input/output error")}) {
    SCOPED_TRACE(message);
    for (const fs::path& path : files()) fs::remove(path);
    const size_t lines = log.lines().size();
    FaultyFiles faulty(operation, 4, reason);
    CacheOptions o = options();
    o.files = &faulty;
    o.ram_bytes = 10 * kTestBlockBytes;
    {
      Cache cache(o, store);
      EXPECT_EQ(run(cache, counting(0, 200)), 0);
      cache.flush();
      EXPECT_FALSE(cache.stats().disk_on);
      EXPECT_EQ(cache.stats().disk.blocks, 0);
      EXPECT_EQ(run(cache, counting(0, 200)), 192) << "memory still remembers";
      for (int32_t i = 1; i < 20; ++i) run(cache, counting(1000 * i, 200));
      cache.flush();
    }
    ASSERT_EQ(log.lines().size(), lines + 1) << "one line";
    EXPECT_EQ(log.lines().back(),
              directory.path() + ": " + message + "; the disk tier of the KV cache is off now");
    EXPECT_EQ(files().size(), 4u) << "what was whole stays";
    for (const auto& entry : fs::directory_iterator(directory.path())) {
      EXPECT_EQ(entry.path().filename().string().find("partial"), std::string::npos);
    }
    Cache cache(options(), store);
    EXPECT_EQ(run(cache, counting(0, 200)), 64) << "and is read by the next start";
  }
}

TEST_F(DiskTest, TurnsItselfOffWhenReadingFailsAndRequestsGoOn) {
  const std::vector<int32_t> tokens = counting(0, 200);
  remember(options(), tokens);
  FaultyFiles faulty(FaultyFiles::Operation::kRead, 5, EIO);
  CacheOptions o = options();
  o.files = &faulty;
  {
    Cache cache(o, store);
    const int32_t found = run(cache, tokens);
    EXPECT_EQ(found, 80) << "what had been read before";
    EXPECT_FALSE(cache.stats().disk_on);
    EXPECT_EQ(run(cache, counting(5000, 200)), 0);
    EXPECT_EQ(run(cache, tokens), 192);
  }
  ASSERT_EQ(log.lines().size(), 1u);
  EXPECT_NE(log.lines()[0].find("cannot read: Input/output error"), std::string::npos);
  Cache cache(options(), store);
  EXPECT_EQ(run(cache, tokens), 192) << "the files are still there";
}

// ---------------------------------------------------------------- compression

TEST_F(DiskTest, CompressesWhenRoomIsShortAndItSaves) {
  groups = {{0, 200, 16384}};
  store = TestStore(groups);  // a test block is mostly the same byte: it compresses well
  if (!can_compress()) GTEST_SKIP() << "this build has no libzstd";
  CacheOptions o = options();
  o.disk_bytes = 100 * (16384 + kFileHeaderBytes);
  {
    Cache cache(o, store);
    for (int32_t i = 0; i < 12; ++i) run(cache, counting(1000 * i, 160));  // 120 blocks
    cache.flush();
    const CacheStats stats = cache.stats();
    EXPECT_LT(stats.compression_ratio, 0.9);
    EXPECT_EQ(stats.disk.blocks, 120) << "more than would fit as they are";
  }
  Cache cache(o, store);
  EXPECT_EQ(run(cache, counting(11000, 160)), 159);
  EXPECT_EQ(run(cache, counting(0, 160)), 159);
}

TEST_F(DiskTest, CompressesWhatHasNoPlanes) {
  groups = {{0, 100, 4096}};
  store = TestStore(groups);
  CacheOptions o = options();
  o.compression = Compression::kOn;
  for (const size_t element_bytes : {0u, 1u, 2u, 4u, 34u}) {
    o.element_bytes = element_bytes;
    const std::vector<int32_t> tokens = counting(1000 * static_cast<int32_t>(element_bytes), 100);
    remember(o, tokens);
    Cache cache(o, store);
    EXPECT_EQ(run(cache, tokens), 96) << element_bytes;
  }
  EXPECT_TRUE(log.lines().empty());
}

TEST(Compressor, SplitsAndJoinsPlanes) {
  std::mt19937 random(1);
  for (const size_t element : {1u, 2u, 3u, 4u}) {
    for (const size_t size : {0u, 1u, 7u, 64u, 1001u}) {
      Bytes from(size), planes(size), back(size);
      for (std::byte& byte : from.span()) byte = static_cast<std::byte>(random());
      split_planes(from.span(), element, planes.span());
      join_planes(planes.span(), element, back.span());
      EXPECT_TRUE(std::equal(from.span().begin(), from.span().end(), back.span().begin()));
      if (element == 2 && size == 64) {
        EXPECT_EQ(planes.span()[32], from.span()[1]);
      }
    }
  }
}

TEST(Compressor, RefusesWhatIsNotExactlyItsOutput) {
  if (!can_compress()) GTEST_SKIP() << "this build has no libzstd";
  Bytes from(5000), back(5000), shorter(4999);
  for (std::byte& byte : from.span()) byte = std::byte{7};
  std::vector<std::byte> packed;
  compress(from.span(), packed);
  EXPECT_LT(packed.size(), 500u);
  EXPECT_TRUE(decompress(packed, back.span()));
  EXPECT_TRUE(std::equal(from.span().begin(), from.span().end(), back.span().begin()));
  EXPECT_FALSE(decompress(packed, shorter.span()));
  packed.pop_back();
  EXPECT_FALSE(decompress(packed, back.span()));
}

TEST(BlockFile, PlainBytesStayWhereTheyWereRead) {
  BlockLabel label;
  label.parent = root_key("test", "");
  std::iota(label.tokens.begin(), label.tokens.end(), 7);
  label.key = child_key(label.parent, label.tokens);
  label.raw_bytes = 1000;
  const std::vector<std::byte> payload(label.raw_bytes, std::byte{3});
  const auto header = encode_header(label, 0, payload);
  std::vector<std::byte> file(header.begin(), header.end());
  file.insert(file.end(), payload.begin(), payload.end());
  const std::byte* const at = file.data() + kFileHeaderBytes;
  const Decoded decoded = decode_file(label, std::move(file));
  ASSERT_NE(decoded.bytes, nullptr) << decoded.fault;
  EXPECT_EQ(decoded.bytes->span().data(), at);
  EXPECT_TRUE(std::ranges::equal(decoded.bytes->span(), payload));
}

TEST(BlockFile, NamesAreReadBack) {
  const BlockKey key = root_key("a", "b");
  const auto name = parse_file_name(file_name(key, 3, 1234));
  ASSERT_TRUE(name);
  EXPECT_EQ(name->key, key);
  EXPECT_EQ(name->group, 3);
  EXPECT_EQ(name->index, 1234);
  EXPECT_EQ(name->version, kFileVersion);
  for (const char* bad :
       {"", "x", "0123456789abcdef0123456789abcdef-0-0.kv", "0123456789abcdef0123456789abcdeF-0-0.kv1",
        "0123456789abcdef0123456789abcdef-4-0.kv1", "0123456789abcdef0123456789abcdef-0-0.kv1x",
        "0123456789abcdef0123456789abcdef_0-0.kv1", "0123456789abcdef0123456789abcdef-0--1.kv1",
        "0123456789abcdef0123456789abcdef-0-99999999999.kv1"}) {
    EXPECT_FALSE(parse_file_name(bad)) << bad;
  }
}

}  // namespace
}  // namespace millrace::kv
