#include "hub/blob_download.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.h"
#include "base/mapped_file.h"

namespace millrace::hub {
namespace {

using std::chrono::milliseconds;
using Json = nlohmann::json;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kMinPiece = kMiB,
                   kMaxPiece = 32 * kMiB;  // what a cut connection costs at most in requests
constexpr int kMaxHops = 8, kMaxMoves = 3;
constexpr std::chrono::seconds kSaveEvery{2};

uint64_t piece_bytes(uint64_t size, int connections) {
  const uint64_t wanted =
      size / static_cast<uint64_t>(connections) / 4;  // so that none is left alone at the end
  return std::clamp((wanted + kMiB - 1) / kMiB * kMiB, kMinPiece, kMaxPiece);
}

// "bytes 0-99/1234" starts where it was asked for, of a file of this size.
bool is_range(const std::string& header, uint64_t begin, uint64_t size) {
  return header.starts_with(fmt::format("bytes {}-", begin)) &&
         (header.ends_with(fmt::format("/{}", size)) || header.ends_with("/*"));
}

std::string strong_etag(const HttpAnswer& answer) {
  std::string etag = answer.header("etag");
  return etag.starts_with('"') ? etag : std::string();
}

}  // namespace

BlobDownload::BlobDownload(HubClient& client, const ModelName& name, const std::string& commit,
                           const RepoFile& file, const RepoFolder& folder,
                           const HubClient::Location& location, int connections,
                           std::function<void(uint64_t done, bool checking)> on_progress)
    : client_(client),
      name_(name),
      commit_(commit),
      file_(file),
      folder_(folder),
      hash_(location.etag),
      connections_(connections),
      on_progress_(std::move(on_progress)),
      location_(location) {}

BlobDownload::~BlobDownload() {
  stop_all();
  digest_.reset();
  if (fd_ && !placed_) save_state();
}

void BlobDownload::run() {
  open_partial();
  for (bool again = true; again;) {
    follow();
    fetch_all();
    const std::string found = check();
    const std::string& expected = file_.sha256.empty() ? file_.blob_sha1 : file_.sha256;
    again = false;
    if (found == expected) break;
    digest_.reset();
    there_.clear();
    if (resumed_) {  // what an earlier process left may be to blame: once more from the start
      resumed_ = false;
      again = true;
      continue;
    }
    placed_ = true;  // nothing to go on with
    ::unlink(folder_.partial(hash_).c_str());
    ::unlink(folder_.state(hash_).c_str());
    throw_error(ErrorCode::kIo,
                "{}: {} is {}, expected {}: what was fetched is not this file and was removed", file_.path,
                file_.sha256.empty() ? "its git hash" : "its SHA-256", found, expected);
  }
  put_in_place();
}

void BlobDownload::open_partial() {
  const std::string path = folder_.partial(hash_);
  fd_.emplace(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (fd_->get() < 0) {
    const int reason = errno;
    fd_.reset();
    throw_error(ErrorCode::kIo, "{}: cannot open: {}", path, std::strerror(reason));
  }
  struct stat status {};
  if (::fstat(fd_->get(), &status) == 0 && static_cast<uint64_t>(status.st_size) == file_.size) load_state();
  resumed_ = there_.bytes() > 0;
  if (!resumed_) allocate();
}

void BlobDownload::allocate() {
  const auto size = static_cast<off_t>(file_.size);
  int reason = ::ftruncate(fd_->get(), 0) == 0 ? 0 : errno;
  if (reason == 0 && size > 0 && ::fallocate(fd_->get(), 0, 0, size) != 0) {
    // Where blocks cannot be reserved the file just grows.
    const bool unknown = errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL;
    reason = unknown && ::ftruncate(fd_->get(), size) == 0 ? 0 : errno;
  }
  if (reason == 0) return;
  fd_.reset();
  ::unlink(folder_.partial(hash_).c_str());
  throw_error(ErrorCode::kIo, "{}: cannot reserve {} bytes for {}: {}", folder_.partial(hash_), file_.size,
              file_.path, std::strerror(reason));
}

void BlobDownload::load_state() {
  const std::string path = folder_.state(hash_);
  if (::access(path.c_str(), R_OK) != 0) return;
  const Json state = Json::parse(read_text_file(path), nullptr, false);
  if (!state.is_object() || state.value("size", uint64_t{0}) != file_.size || !state.contains("have")) return;
  ByteRanges have;
  for (const Json& range : state["have"]) {
    if (!range.is_array() || range.size() != 2 || !range[0].is_number_unsigned() ||
        !range[1].is_number_unsigned() || range[1].get<uint64_t>() > file_.size) {
      return;
    }
    have.add({range[0].get<uint64_t>(), range[1].get<uint64_t>()});
  }
  there_ = have;
  if (state.contains("etag") && state["etag"].is_string()) etag_ = state["etag"].get<std::string>();
}

void BlobDownload::save_state() {
  saved_ = Clock::now();
  Json have = Json::array();
  for (const ByteRange& range : there_.ranges()) have.push_back({range.begin, range.end});
  const Json state = {{"size", file_.size}, {"etag", etag_}, {"have", std::move(have)}};
  const std::string path = folder_.state(hash_), fresh = path + ".new";
  // Without it the next pull begins anew and the hash is checked anyway: no reason to give up.
  std::ofstream out(fresh, std::ios::trunc);
  out << state.dump();
  out.close();
  if (out) std::rename(fresh.c_str(), path.c_str());
}

void BlobDownload::follow() {
  digest_.reset();
  digest_ = std::make_unique<FollowingDigest>(
      file_.sha256.empty() ? make_blob_sha1(file_.size) : make_sha256(), fd_->get());
  digest_->grown_to(there_.prefix());
}

void BlobDownload::fetch_all() {
  waiting_ = there_.missing(file_.size, piece_bytes(file_.size, connections_));
  while (!waiting_.empty() || !pieces_.empty()) {
    const size_t most = whole_ ? 1 : static_cast<size_t>(connections_);
    while (!waiting_.empty() && pieces_.size() < most && Clock::now() >= not_before_) {
      const ByteRange first = waiting_.front();  // so that the hash can follow
      waiting_.erase(waiting_.begin());
      start(first);
    }
    look_after_pieces();
    digest_->grown_to(there_.prefix());
    if (Clock::now() - saved_ > kSaveEvery) save_state();
    on_progress_(there_.bytes(), false);
  }
}

void BlobDownload::look_after_pieces() {
  for (const HttpClient::Finished& done : client_.http().wait(100)) {
    finished(done.number, done.answer);
    if (restart_) break;
  }
  if (write_error_ != 0) {
    throw_error(ErrorCode::kIo, "{}: cannot write: {}", folder_.partial(hash_), std::strerror(write_error_));
  }
  if (!problem_.empty()) throw_error(ErrorCode::kIo, "{}: {}", file_.path, problem_);
  if (restart_) restart();
}

void BlobDownload::start(ByteRange range) {
  HttpQuery query = client_.query(location_.url);
  if (range.size() < file_.size) {
    query.headers.push_back(fmt::format("Range: bytes={}-{}", range.begin, range.end - 1));
    if (!etag_.empty()) query.headers.push_back("If-Range: " + etag_);
  }
  Piece& piece = pieces_.emplace_back(Piece{.range = range});
  query.on_body = [this, &piece](const HttpAnswer& answer, std::span<const std::byte> bytes) {
    return take(piece, answer, bytes);
  };
  piece.number = client_.http().begin(std::move(query));
}

// On libcurl's stack: nothing is thrown here.
bool BlobDownload::take(Piece& piece, const HttpAnswer& answer, std::span<const std::byte> bytes) {
  if (!piece.accepted && !accept(piece, answer)) return false;
  piece.accepted = true;
  if (bytes.size() > piece.range.size() - piece.written) {
    problem_ = fmt::format("found more than the {} bytes that were asked for", piece.range.size());
    return false;
  }
  while (!bytes.empty()) {
    const uint64_t at = piece.range.begin + piece.written;
    const ssize_t n = ::pwrite(fd_->get(), bytes.data(), bytes.size(), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      write_error_ = n < 0 ? errno : EIO;
      return false;
    }
    piece.written += static_cast<uint64_t>(n);
    there_.add({at, at + static_cast<uint64_t>(n)});
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  // A server without ranges begins anew after each failure: those count until it is done.
  if (!whole_) failures_ = redirects_ = moves_ = 0;
  return true;
}

bool BlobDownload::accept(const Piece& piece, const HttpAnswer& answer) {
  const bool all = piece.range.size() == file_.size;
  if (answer.status == 206 && !all) {
    const std::string range = answer.header("content-range");
    if (!is_range(range, piece.range.begin, file_.size)) {
      problem_ = fmt::format("found range '{}', expected bytes {} to {} of {}", range, piece.range.begin,
                             piece.range.end, file_.size);
      return false;
    }
    if (etag_.empty()) etag_ = strong_etag(answer);
    return true;
  }
  if (answer.status == 200 && all) {
    const std::string length = answer.header("content-length");
    if (!length.empty() && length != std::to_string(file_.size)) {
      problem_ = fmt::format("found {} bytes, expected {}", length, file_.size);
      return false;
    }
    return true;
  }
  restart_ = restart_ || answer.status == 200;
  return false;  // the text of an error, or the whole file where a part of it was wanted
}

void BlobDownload::finished(int number, const HttpAnswer& answer) {
  const auto found = std::find_if(pieces_.begin(), pieces_.end(),
                                  [&](const Piece& piece) { return piece.number == number; });
  if (found == pieces_.end()) return;
  const Piece piece = *found;
  pieces_.erase(found);
  if (restart_ || write_error_ != 0 || !problem_.empty()) return;
  ByteRange left = {piece.range.begin + piece.written, piece.range.end};
  const bool right = answer.status == 200 || answer.status == 206;
  if (right && left.size() == 0) return;
  if (whole_) {
    there_.clear();
    follow();
    left = {0, file_.size};
  }
  waiting_.insert(waiting_.begin(), left);
  HttpAnswer what = answer;
  if (right && what.error.empty()) what.error = "the connection ended early";
  failed(what);
}

void BlobDownload::failed(const HttpAnswer& answer) {
  const int status = answer.status;
  if (answer.error.empty() && status >= 300 && status < 400 && !answer.header("location").empty()) {
    if (++redirects_ > kMaxHops) {
      throw_error(ErrorCode::kIo, "{}: found more than {} redirects, expected the file", file_.path,
                  kMaxHops);
    }
    location_.url = redirected(location_.url, answer.header("location"));
    return;
  }
  const bool expired = status == 400 || status == 401 || status == 403 || status == 404 || status == 410;
  if (answer.error.empty() && expired && !client_.is_endpoint(location_.url) && ++moves_ <= kMaxMoves) {
    stop_all();  // while the hub is asked for a new address nobody looks after them
    location_ = client_.locate(name_, commit_, file_.path);
    return;
  }
  const bool again_soon = Clock::now() < not_before_;  // of several that fail together, one counts
  if (!again_soon) ++failures_;
  const std::optional<milliseconds> wait = retry_after(answer, again_soon ? 1 : failures_);
  if (wait) {
    if (!again_soon) not_before_ = Clock::now() + *wait;
    return;
  }
  if (answer.error.empty()) client_.refuse(answer, name_, file_.path);
  throw_error(ErrorCode::kIo,
              "{}: {}, and again after {} tries: what was fetched is kept, the same command goes on",
              file_.path, answer.error, failures_);
}

void BlobDownload::stop_all() {
  for (const Piece& piece : pieces_) {
    client_.http().stop(piece.number);
    const ByteRange left = {piece.range.begin + piece.written, piece.range.end};
    if (left.size() > 0) waiting_.push_back(left);
  }
  pieces_.clear();
}

// The server sent the whole file for a range: it has another file now, or it knows no ranges at all.
void BlobDownload::restart() {
  restart_ = false;
  stop_all();
  whole_ = etag_.empty();
  etag_.clear();
  there_.clear();
  follow();
  waiting_ = whole_ ? std::vector<ByteRange>{{0, file_.size}}
                    : there_.missing(file_.size, piece_bytes(file_.size, connections_));
}

std::string BlobDownload::check() {
  digest_->grown_to(file_.size);
  while (!digest_->finished(file_.size)) {
    on_progress_(digest_->hashed(), true);
    std::this_thread::sleep_for(milliseconds(20));
  }
  return digest_->hex();
}

void BlobDownload::put_in_place() {
  const std::string partial = folder_.partial(hash_), blob = folder_.blob(hash_);
  digest_.reset();
  if (::fsync(fd_->get()) != 0 || ::rename(partial.c_str(), blob.c_str()) != 0) {
    throw_error(ErrorCode::kIo, "{}: cannot be kept: {}", blob, std::strerror(errno));
  }
  placed_ = true;
  ::unlink(folder_.state(hash_).c_str());
}

}  // namespace millrace::hub
