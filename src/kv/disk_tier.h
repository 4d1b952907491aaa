// DiskTier: block files in one directory, written and read by two threads (one each, so that a read never
// waits behind a write). It knows files, not blocks: which one to write, read or remove is the cache's
// decision, and what came of it is told back through take().
//
// Crash safety: a file is written under a temporary name and renamed. A process that is killed leaves whole
// files and temporary ones, which the next start removes. Nothing is synced: after a power failure the
// checksums decide.
// Trouble: a damaged file is removed with one line of log. When the disk is full or fails the tier turns
// itself off with one line; every job after that comes back failed.
// Compression, when automatic: the first blocks of every few thousand are compressed to see what it saves. It
// goes on if it saves a tenth and either space is short (set_short_of_space) or this disk reads so slowly
// that fewer bytes and the time to unpack them are less than the bytes as they are.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kv/block_file.h"
#include "kv/cache.h"
#include "kv/file_system.h"

namespace millrace::kv {

class DiskTier {
 public:
  struct Options {
    std::string directory;
    size_t element_bytes = 2;
    Compression compression = Compression::kAutomatic;
    FileSystem* files = nullptr;
    std::function<void(const std::string&)> log;
    std::function<void()> wake;
  };
  struct Found {
    BlockKey key;
    int group = 0;
    int32_t index = 0;
    uint64_t bytes = 0;
  };
  struct Done {
    bool is_write = false, is_header = false, ok = false;
    int32_t item = 0;                 // the caller's number
    uint64_t stored_bytes = 0;        // of a write: the file's size
    Buffer bytes;                     // of a read
    std::optional<BlockLabel> label;  // of a header, unless it is damaged
  };
  struct Rates {
    double write = 0, read = 0;  // raw bytes per second of work, with (de)compression
    double file_read = 0;        // bytes of files per second
    uint64_t raw_bytes = 0, stored_bytes = 0, bytes_read = 0;
    uint64_t files_dropped = 0;
    bool compressing = false;
  };

  // Locks the directory and lists it. Throws Error: kBadInput when another process has it, kIo.
  explicit DiskTier(Options options);
  ~DiskTier();  // finishes the jobs that run, drops those that wait

  // What was there at the start, oldest use first. Once.
  std::vector<Found> take_found() { return std::move(found_); }

  // Writes and removes happen in this order, one after another. So do reads, beside them.
  void write(int32_t item, const BlockLabel& label, Buffer bytes);
  void remove(const BlockKey& key, int group, int32_t index);
  void read(int32_t item, const BlockLabel& label);
  void read_header(const BlockKey& key, int group, int32_t index);  // what a file says it is

  void take(std::vector<Done>& done);            // moves what has finished into done
  bool wait(std::chrono::milliseconds at_most);  // until something has finished; false: the time is over
  void set_short_of_space(bool is_short) { short_of_space_.store(is_short, std::memory_order_relaxed); }
  bool on() const { return !off_.load(std::memory_order_acquire); }
  Rates rates() const;

 private:
  struct Job {
    enum class Kind { kWrite, kRead, kReadHeader, kRemove } kind;
    int32_t item;
    BlockLabel label;
    Buffer bytes;
  };
  struct Worker {
    std::deque<Job> jobs;
    std::condition_variable changed;
    std::thread thread;
  };
  void scan();
  void work(Worker& worker);
  void push(Worker& worker, Job job);
  Done run(const Job& job);
  int write_block(const Job& job, Done& done);
  int read_block(const Job& job, Done& done);
  int read_header(const Job& job, Done& done);
  std::vector<std::byte> payload_of(const Job& job, size_t& element_bytes);
  void sample(std::span<const std::byte> raw, std::span<const std::byte> compressed);
  bool pays() const;
  void turn_off(const char* doing, int reason) noexcept;
  void drop(const std::string& name, const std::string& fault);
  std::string path(const std::string& name) const { return options_.directory + "/" + name; }

  Options options_;
  FileSystem& files_;
  std::shared_ptr<void> lock_;
  std::vector<Found> found_;
  std::atomic<bool> off_{false}, short_of_space_{false};

  mutable std::mutex mutex_;  // everything below
  bool stopping_ = false;
  Worker writer_, reader_;
  std::vector<Done> done_;
  size_t unanswered_ = 0;  // jobs whose Done has not been taken
  std::condition_variable finished_;
  Rates rates_;

  // The writer's own.
  uint64_t temporary_ = 0, blocks_written_ = 0;
  uint64_t sample_raw_ = 0, sample_stored_ = 0;
  double saved_ratio_ = 1, unpack_rate_ = 0;  // of the last samples: stored / raw, raw bytes per second
};

}  // namespace millrace::kv
