#include "kv/disk_tier.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "kv/compressor.h"

namespace millrace::kv {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kLockName = "millrace-kv.lock";
constexpr const char* kTemporaryPrefix = "partial-";
// Automatic compression tries the first so many blocks of every so many.
constexpr uint64_t kSampleBlocks = 16, kSampleEvery = 4096;
constexpr double kWorthwhile = 0.9;  // stored / raw

std::string name_of(const BlockLabel& label) { return file_name(label.key, label.group, label.index); }

double rate(double before, uint64_t bytes, Clock::duration time) {
  const double now = static_cast<double>(bytes) / std::max(std::chrono::duration<double>(time).count(), 1e-9);
  return before == 0 ? now : 0.9 * before + 0.1 * now;
}

}  // namespace

DiskTier::DiskTier(Options options) : options_(std::move(options)), files_(*options_.files) {
  options_.element_bytes = std::max<size_t>(options_.element_bytes, 1);  // 0 in a file: not compressed
  if (const int reason = files_.make_directory(options_.directory); reason != 0) {
    throw_error(ErrorCode::kIo, "{}: cannot make the directory: {}", options_.directory,
                std::strerror(reason));
  }
  std::string holder;
  const int reason = files_.lock(path(kLockName), lock_, holder);
  if (reason == EWOULDBLOCK) {
    throw_error(ErrorCode::kBadInput, "{}: found in use by process {}, expected a directory of its own",
                options_.directory, holder.empty() ? "?" : holder);
  }
  if (reason != 0) {
    throw_error(ErrorCode::kIo, "{}: cannot lock: {}", path(kLockName), std::strerror(reason));
  }
  scan();
  for (Worker* worker : {&writer_, &reader_}) worker->thread = std::thread([this, worker] { work(*worker); });
}

DiskTier::~DiskTier() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  for (Worker* worker : {&writer_, &reader_}) {
    worker->changed.notify_all();
    worker->thread.join();
  }
}

void DiskTier::scan() {
  std::vector<FileEntry> entries;
  if (const int reason = files_.list(options_.directory, entries); reason != 0) {
    throw_error(ErrorCode::kIo, "{}: cannot read the directory: {}", options_.directory,
                std::strerror(reason));
  }
  // Oldest use first. The blocks of a prompt are used within seconds of each other; counting each a second
  // older than the one before it makes a prompt leave from its end, without which its beginning is still
  // good.
  constexpr int64_t kSecond = 1000000000;
  const auto age = [](const FileEntry& entry) {
    const auto name = parse_file_name(entry.name);
    return entry.modified_ns - (name ? name->index * kSecond : 0);
  };
  std::sort(entries.begin(), entries.end(), [&](const FileEntry& a, const FileEntry& b) {
    return std::pair(age(a), std::string_view(a.name)) < std::pair(age(b), std::string_view(b.name));
  });
  size_t half_written = 0, stale = 0, foreign = 0;
  for (const FileEntry& entry : entries) {
    if (entry.name == kLockName) continue;
    const auto name = parse_file_name(entry.name);
    if (name && name->version == kFileVersion) {
      found_.push_back({name->key, name->group, name->index, entry.bytes});
    } else if (name || entry.name.starts_with(kTemporaryPrefix)) {
      ++(name ? stale : half_written);
      files_.remove(path(entry.name));
    } else {
      ++foreign;  // not ours to remove
    }
  }
  rates_.files_dropped = half_written + stale + foreign;
  if (rates_.files_dropped > 0) {
    options_.log(
        fmt::format("{}: dropped {} half-written and {} files of another version; ignoring {} foreign files",
                    options_.directory, half_written, stale, foreign));
  }
}

// ---------------------------------------------------------------- jobs in, results out

void DiskTier::push(Worker& worker, Job job) {
  {
    const std::lock_guard lock(mutex_);
    // Room for its answer too: the threads must not be the ones to find that there is none.
    const bool answered = job.kind != Job::Kind::kRemove;
    if (answered && done_.capacity() <= unanswered_) done_.reserve(2 * unanswered_ + 16);
    worker.jobs.push_back(std::move(job));
    unanswered_ += answered;
  }
  worker.changed.notify_one();
}

void DiskTier::write(int32_t item, const BlockLabel& label, Buffer bytes) {
  push(writer_, {Job::Kind::kWrite, item, label, std::move(bytes)});
}

void DiskTier::remove(const BlockKey& key, int group, int32_t index) {
  push(writer_, {Job::Kind::kRemove, 0, {.key = key, .parent = {}, .group = group, .index = index}, nullptr});
}

void DiskTier::read(int32_t item, const BlockLabel& label) {
  push(reader_, {Job::Kind::kRead, item, label, nullptr});
}

void DiskTier::read_header(const BlockKey& key, int group, int32_t index) {
  push(reader_,
       {Job::Kind::kReadHeader, 0, {.key = key, .parent = {}, .group = group, .index = index}, nullptr});
}

void DiskTier::take(std::vector<Done>& done) {
  const std::lock_guard lock(mutex_);
  done.reserve(done.size() + done_.size());  // may throw: they are still here then
  for (Done& one : done_) done.push_back(std::move(one));
  unanswered_ -= done_.size();
  done_.clear();
}

bool DiskTier::wait(std::chrono::milliseconds at_most) {
  std::unique_lock lock(mutex_);
  return finished_.wait_for(lock, at_most, [&] { return !done_.empty(); });
}

DiskTier::Rates DiskTier::rates() const {
  const std::lock_guard lock(mutex_);
  return rates_;
}

// ---------------------------------------------------------------- on the threads

void DiskTier::work(Worker& worker) {
  std::unique_lock lock(mutex_);
  while (true) {
    worker.changed.wait(lock, [&] { return stopping_ || !worker.jobs.empty(); });
    if (stopping_) return;
    const Job job = std::move(worker.jobs.front());
    worker.jobs.pop_front();
    lock.unlock();
    Done done = run(job);
    lock.lock();
    if (job.kind == Job::Kind::kRemove) continue;
    done_.push_back(std::move(done));
    finished_.notify_all();
    if (!done_.back().is_write && options_.wake) {
      lock.unlock();
      options_.wake();
      lock.lock();
    }
  }
}

DiskTier::Done DiskTier::run(const Job& job) {
  Done done;
  done.is_write = job.kind == Job::Kind::kWrite;
  done.is_header = job.kind == Job::Kind::kReadHeader;
  done.item = job.item;
  if (!on()) return done;
  const bool removing = job.kind == Job::Kind::kRemove;
  int reason = 0;
  try {
    if (removing) {
      reason = files_.remove(path(name_of(job.label)));
      if (reason == ENOENT) reason = 0;
    } else {
      reason = done.is_write    ? write_block(job, done)
               : done.is_header ? read_header(job, done)
                                : read_block(job, done);
    }
  } catch (const std::bad_alloc&) {
    done.ok = false;
    reason = ENOMEM;
  }
  if (reason != 0) turn_off(removing ? "remove a file" : done.is_write ? "write" : "read", reason);
  return done;
}

// The bytes to store: compressed, or empty when they are stored as they are.
std::vector<std::byte> DiskTier::payload_of(const Job& job, size_t& element_bytes) {
  element_bytes = 0;
  std::vector<std::byte> compressed;
  if (options_.compression == Compression::kOff || !can_compress()) return compressed;
  const uint64_t place = blocks_written_++ % kSampleEvery;
  const bool sampling = options_.compression == Compression::kAutomatic && place < kSampleBlocks;
  if (!sampling && options_.compression == Compression::kAutomatic && !pays()) return compressed;

  Bytes planes(job.bytes->span().size());
  split_planes(job.bytes->span(), options_.element_bytes, planes.span());
  compress(planes.span(), compressed);
  if (sampling) {
    if (place == 0) sample_raw_ = sample_stored_ = 0;
    sample(planes.span(), compressed);
  }
  if (compressed.size() >= job.bytes->span().size()) compressed.clear();
  if (!compressed.empty()) element_bytes = options_.element_bytes;
  return compressed;
}

void DiskTier::sample(std::span<const std::byte> raw, std::span<const std::byte> compressed) {
  Bytes decompressed(raw.size());
  const auto start = Clock::now();
  decompress(compressed, decompressed.span());
  unpack_rate_ = rate(unpack_rate_, raw.size(), Clock::now() - start);
  sample_raw_ += raw.size();
  sample_stored_ += compressed.size();
  saved_ratio_ = static_cast<double>(sample_stored_) / static_cast<double>(sample_raw_);
}

bool DiskTier::pays() const {
  if (saved_ratio_ > kWorthwhile) return false;
  if (short_of_space_.load(std::memory_order_relaxed)) return true;
  const std::lock_guard lock(mutex_);
  return rates_.file_read > 0 && saved_ratio_ + rates_.file_read / unpack_rate_ < 1;
}

int DiskTier::write_block(const Job& job, Done& done) {
  const auto start = Clock::now();
  size_t element_bytes = 0;
  const std::vector<std::byte> compressed = payload_of(job, element_bytes);
  const std::span<const std::byte> payload = compressed.empty() ? job.bytes->span() : std::span(compressed);
  const auto header = encode_header(job.label, element_bytes, payload);
  const std::string temporary = path(fmt::format("{}{}-{}", kTemporaryPrefix, ::getpid(), temporary_++));
  const std::span<const std::byte> parts[] = {header, payload};
  int reason = files_.write(temporary, parts);
  if (reason == 0) reason = files_.rename(temporary, path(name_of(job.label)));
  if (reason != 0) {
    files_.remove(temporary);
    return reason;
  }
  done.ok = true;
  done.stored_bytes = header.size() + payload.size();
  const std::lock_guard lock(mutex_);
  rates_.write = rate(rates_.write, job.bytes->span().size(), Clock::now() - start);
  rates_.raw_bytes += job.bytes->span().size();
  rates_.stored_bytes += payload.size();
  rates_.compressing = !compressed.empty();
  return 0;
}

int DiskTier::read_block(const Job& job, Done& done) {
  const auto start = Clock::now();
  const std::string name = name_of(job.label);
  std::vector<std::byte> file;
  const int reason = files_.read(path(name), file, kFileHeaderBytes + job.label.raw_bytes);
  if (reason == ENOENT || reason == EFBIG) {
    drop(name, reason == ENOENT ? "the file is gone" : "longer than its block");
    return 0;
  }
  if (reason != 0) return reason;
  const auto file_time = Clock::now() - start;
  const size_t file_bytes = file.size();
  Decoded decoded = decode_file(job.label, std::move(file));
  if (decoded.bytes == nullptr) {
    drop(name, decoded.fault);
    return 0;
  }
  files_.touch(path(name));  // the order of use outlives the process; it may fail on a read-only disk
  done.ok = true;
  done.bytes = std::move(decoded.bytes);
  const std::lock_guard lock(mutex_);
  rates_.read = rate(rates_.read, job.label.raw_bytes, Clock::now() - start);
  rates_.file_read = rate(rates_.file_read, file_bytes, file_time);
  rates_.bytes_read += file_bytes;
  return 0;
}

// A file with a fault is left for whoever asks for its block.
int DiskTier::read_header(const Job& job, Done& done) {
  std::vector<std::byte> header;
  const int reason = files_.read(path(name_of(job.label)), header, kFileHeaderBytes);
  if (reason != 0 && reason != EFBIG) return reason == ENOENT ? 0 : reason;
  done.label = decode_header(header);
  done.ok = done.label.has_value();
  const std::lock_guard lock(mutex_);
  rates_.bytes_read += header.size();
  return 0;
}

void DiskTier::drop(const std::string& name, const std::string& fault) {
  options_.log(fmt::format("{}: dropped: {}", path(name), fault));
  files_.remove(path(name));
  const std::lock_guard lock(mutex_);
  ++rates_.files_dropped;
}

void DiskTier::turn_off(const char* doing, int reason) noexcept {
  if (off_.exchange(true, std::memory_order_acq_rel)) return;
  try {
    options_.log(fmt::format("{}: cannot {}: {}; the disk tier of the KV cache is off now",
                             options_.directory, doing, std::strerror(reason)));
  } catch (const std::bad_alloc&) {
    std::fputs("millrace: out of memory; the disk tier of the KV cache is off now\n", stderr);
  }
}

}  // namespace millrace::kv
