// One file of a repository, fetched in parallel ranges into blobs/HASH.millrace.incomplete and renamed when
// it is whole and its hash is right. HASH.millrace.state beside it says which bytes are there, so that
// another process goes on where this one was stopped, by whatever.
#pragma once

#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "hub/byte_ranges.h"
#include "hub/following_digest.h"
#include "hub/hub_client.h"
#include "hub/model_cache.h"

namespace millrace::hub {

class BlobDownload {
 public:
  // `file` has its size and a hash. `on_progress(bytes there, checking)` may throw.
  BlobDownload(HubClient& client, const ModelName& name, const std::string& commit, const RepoFile& file,
               const RepoFolder& folder, const HubClient::Location& location, int connections,
               std::function<void(uint64_t done, bool checking)> on_progress);
  ~BlobDownload();
  BlobDownload(const BlobDownload&) = delete;
  BlobDownload& operator=(const BlobDownload&) = delete;

  // The file is blobs/HASH afterwards. Throws Error; what was fetched stays for the next time, unless the
  // hash is wrong.
  void run();

 private:
  using Clock = std::chrono::steady_clock;
  struct Piece {  // a request under way
    ByteRange range;
    uint64_t written = 0;
    int number = 0;         // HttpClient's
    bool accepted = false;  // its headers are right
  };

  void open_partial();
  void load_state();
  void save_state();
  void allocate();
  void follow();     // starts the hash anew
  void fetch_all();  // until nothing is missing
  void look_after_pieces();
  void start(ByteRange range);
  bool take(Piece& piece, const HttpAnswer& answer, std::span<const std::byte> bytes);
  bool accept(const Piece& piece, const HttpAnswer& answer);
  void finished(int number, const HttpAnswer& answer);
  void failed(const HttpAnswer& answer);
  void stop_all();
  void restart();       // from the first byte
  std::string check();  // waits for the hash and returns it
  void put_in_place();

  HubClient& client_;
  const ModelName& name_;
  const std::string& commit_;
  const RepoFile& file_;
  const RepoFolder& folder_;
  std::string hash_;  // the blob's name
  int connections_;
  std::function<void(uint64_t, bool)> on_progress_;

  std::optional<Descriptor> fd_;
  HubClient::Location location_;
  std::string etag_;      // of the server that sends the bytes, for If-Range; empty: none to rely on
  ByteRanges there_;      // written to the file
  bool resumed_ = false;  // some of it by an earlier process
  bool whole_ = false;    // the server knows no ranges: one connection, from the start
  bool restart_ = false;  // it sent the whole file where a range was asked for
  bool placed_ = false;   // it has its name
  std::vector<ByteRange> waiting_;
  std::list<Piece> pieces_;
  std::unique_ptr<FollowingDigest> digest_;
  int failures_ = 0, redirects_ = 0, moves_ = 0;  // since bytes came last
  Clock::time_point not_before_ = Clock::now(), saved_ = Clock::now();
  std::string problem_;  // what is wrong with an answer
  int write_error_ = 0;
};

}  // namespace millrace::hub
