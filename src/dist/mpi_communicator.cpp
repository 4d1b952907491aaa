#include "dist/mpi_communicator.h"

#include <cstdlib>

#include "base/error.h"

#ifdef MILLRACE_MPI

#include <dlfcn.h>
#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <exception>
#include <numeric>
#include <thread>

#include "base/check.h"
#include "dist/delayed_communicator.h"
#include "dist/point_to_point.h"

namespace millrace::dist {
namespace {

constexpr int kTag = 28, kNoteTag = 29;
constexpr size_t kMaxMessage = size_t{1} << 30;  // MPI counts in int: longer ones go in pieces
// A rank that waits looks all the time at first, then now and then: a server without requests rests.
constexpr auto kSpin = std::chrono::milliseconds(20);
constexpr auto kRest = std::chrono::microseconds(200);

// Open MPI's functions and objects, by name out of its library.
struct Library {
  void* handle = nullptr;
  std::string fault;  // why it could not be opened

  decltype(&MPI_Init_thread) init_thread = nullptr;
  decltype(&MPI_Finalize) finalize = nullptr;
  decltype(&MPI_Abort) abort = nullptr;
  decltype(&MPI_Comm_rank) comm_rank = nullptr;
  decltype(&MPI_Comm_size) comm_size = nullptr;
  decltype(&MPI_Comm_split) comm_split = nullptr;
  decltype(&MPI_Comm_free) comm_free = nullptr;
  decltype(&MPI_Comm_set_errhandler) comm_set_errhandler = nullptr;
  decltype(&MPI_Send) send = nullptr;
  decltype(&MPI_Isend) isend = nullptr;
  decltype(&MPI_Test) test = nullptr;
  decltype(&MPI_Recv) recv = nullptr;
  decltype(&MPI_Sendrecv) sendrecv = nullptr;
  decltype(&MPI_Iprobe) iprobe = nullptr;
  decltype(&MPI_Allgatherv) allgatherv = nullptr;
  decltype(&MPI_Bcast) bcast = nullptr;
  decltype(&MPI_Barrier) barrier = nullptr;
  decltype(&MPI_Error_string) error_string = nullptr;
  decltype(&MPI_Get_library_version) get_library_version = nullptr;
  MPI_Comm world{};
  MPI_Datatype byte{};
  MPI_Errhandler errors_return{};
  bool started = false, many_threads = false;
  std::atomic<bool> ended{false};
  int communicators = 0;  // of ours that are there

  template <class T>
  void find(T& to, const char* name) {
    void* symbol = dlsym(handle, name);
    if (symbol == nullptr && fault.empty()) fault = fmt::format("it has no {}", name);
    to = reinterpret_cast<T>(symbol);
  }

  Library() {
    // Its plugins look for its names among everybody's.
    handle = dlopen("libmpi.so.40", RTLD_NOW | RTLD_GLOBAL);
    if (handle == nullptr) {
      fault = dlerror();
      return;
    }
    find(init_thread, "MPI_Init_thread");
    find(finalize, "MPI_Finalize");
    find(abort, "MPI_Abort");
    find(comm_rank, "MPI_Comm_rank");
    find(comm_size, "MPI_Comm_size");
    find(comm_split, "MPI_Comm_split");
    find(comm_free, "MPI_Comm_free");
    find(comm_set_errhandler, "MPI_Comm_set_errhandler");
    find(send, "MPI_Send");
    find(isend, "MPI_Isend");
    find(test, "MPI_Test");
    find(recv, "MPI_Recv");
    find(sendrecv, "MPI_Sendrecv");
    find(iprobe, "MPI_Iprobe");
    find(allgatherv, "MPI_Allgatherv");
    find(bcast, "MPI_Bcast");
    find(barrier, "MPI_Barrier");
    find(error_string, "MPI_Error_string");
    find(get_library_version, "MPI_Get_library_version");
    find(world, "ompi_mpi_comm_world");
    find(byte, "ompi_mpi_byte");
    find(errors_return, "ompi_mpi_errors_return");
  }

  void check(int status, std::string_view what) const {
    if (status == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    error_string(status, text, &length);
    throw_error(ErrorCode::kDevice, "MPI {}: {}", what, std::string_view(text, static_cast<size_t>(length)));
  }
};

Library& library() {
  static Library only;  // MPI is per process
  return only;
}

Library& opened() {
  Library& mpi = library();
  if (!mpi.fault.empty()) {
    throw_error(ErrorCode::kUnsupported, "Open MPI cannot be opened ({}): install openmpi-bin", mpi.fault);
  }
  return mpi;
}

class MpiCommunicator final : public PointToPoint {
 public:
  explicit MpiCommunicator(MPI_Comm comm) : mpi_(opened()), comm_(comm) {
    mpi_.check(mpi_.comm_set_errhandler(comm_, mpi_.errors_return), "errhandler");
    mpi_.check(mpi_.comm_rank(comm_, &rank_), "rank");
    mpi_.check(mpi_.comm_size(comm_, &size_), "size");
    ++mpi_.communicators;
  }
  ~MpiCommunicator() override {
    // A rank that fails has others that wait for something else than its end: abort_mpi ends them.
    if (mpi_.ended || std::uncaught_exceptions() > 0) return;
    if (comm_ != mpi_.world) mpi_.comm_free(&comm_);
    if (--mpi_.communicators > 0) return;
    mpi_.ended = true;
    mpi_.finalize();
  }
  MpiCommunicator(const MpiCommunicator&) = delete;
  MpiCommunicator& operator=(const MpiCommunicator&) = delete;

  std::string_view name() const override { return "mpi"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void send(int to, std::span<const std::byte> bytes) override {
    traffic_.bytes_sent += bytes.size();
    ++traffic_.calls;
    do {
      const auto piece = bytes.first(std::min(bytes.size(), kMaxMessage));
      mpi_.check(mpi_.send(piece.data(), static_cast<int>(piece.size()), mpi_.byte, to, kTag, comm_), "send");
      bytes = bytes.subspan(piece.size());
    } while (!bytes.empty());
  }

  void recv(int from, std::span<std::byte> bytes) override {
    wait_for_message(from);
    traffic_.bytes_received += bytes.size();
    ++traffic_.calls;
    do {
      const auto piece = bytes.first(std::min(bytes.size(), kMaxMessage));
      mpi_.check(mpi_.recv(piece.data(), static_cast<int>(piece.size()), mpi_.byte, from, kTag, comm_,
                           MPI_STATUS_IGNORE),
                 "recv");
      bytes = bytes.subspan(piece.size());
    } while (!bytes.empty());
  }

  void send_recv(int to, std::span<const std::byte> out, int from, std::span<std::byte> in) override {
    traffic_.bytes_sent += out.size();
    traffic_.bytes_received += in.size();
    ++traffic_.calls;
    // At least one message each way, also of nothing.
    const size_t pieces =
        std::max<size_t>(1, (std::max(out.size(), in.size()) + kMaxMessage - 1) / kMaxMessage);
    for (size_t i = 0; i < pieces; ++i) {
      const auto piece = [&](auto bytes) {
        const size_t begin = std::min(bytes.size(), i * kMaxMessage);
        return bytes.subspan(begin, std::min(bytes.size() - begin, kMaxMessage));
      };
      const auto o = piece(out);
      const auto n = piece(in);
      const bool sends = i == 0 || !o.empty(), receives = i == 0 || !n.empty();
      mpi_.check(mpi_.sendrecv(o.data(), static_cast<int>(o.size()), mpi_.byte, sends ? to : MPI_PROC_NULL,
                               kTag, n.data(), static_cast<int>(n.size()), mpi_.byte,
                               receives ? from : MPI_PROC_NULL, kTag, comm_, MPI_STATUS_IGNORE),
                 "sendrecv");
    }
  }

  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all,
                  std::span<const size_t> bytes_of_rank) override {
    if (all.size() > INT_MAX) return PointToPoint::all_gather(mine, all, bytes_of_rank);
    MILLRACE_CHECK(bytes_of_rank.size() == static_cast<size_t>(size_));
    MILLRACE_CHECK(mine.size() == bytes_of_rank[static_cast<size_t>(rank_)]);
    counts_.assign(bytes_of_rank.begin(), bytes_of_rank.end());
    offsets_.assign(counts_.size(), 0);
    std::partial_sum(counts_.begin(), counts_.end() - 1, offsets_.begin() + 1);
    std::byte* own = all.data() + offsets_[static_cast<size_t>(rank_)];
    if (!mine.empty() && own != mine.data()) std::copy(mine.begin(), mine.end(), own);
    mpi_.check(mpi_.allgatherv(MPI_IN_PLACE, 0, mpi_.byte, all.data(), counts_.data(), offsets_.data(),
                               mpi_.byte, comm_),
               "allgatherv");
    traffic_.bytes_sent += mine.size() * static_cast<size_t>(size_ - 1);
    traffic_.bytes_received += all.size() - mine.size();
    ++traffic_.calls;
  }

  void broadcast(int root, std::span<std::byte> bytes) override {
    ++traffic_.calls;
    (rank_ == root ? traffic_.bytes_sent : traffic_.bytes_received) += bytes.size();
    while (!bytes.empty()) {
      const auto piece = bytes.first(std::min(bytes.size(), kMaxMessage));
      mpi_.check(mpi_.bcast(piece.data(), static_cast<int>(piece.size()), mpi_.byte, root, comm_), "bcast");
      bytes = bytes.subspan(piece.size());
    }
  }

  void barrier() override {
    ++traffic_.calls;
    mpi_.check(mpi_.barrier(comm_), "barrier");
  }

  std::unique_ptr<Communicator> split(int colour, int key) override {
    MPI_Comm part{};
    mpi_.check(mpi_.comm_split(comm_, colour, key, &part), "split");
    return std::make_unique<MpiCommunicator>(part);
  }

  Traffic traffic() const override { return traffic_; }

 private:
  void wait_for_message(int from) {
    const auto spin_until = std::chrono::steady_clock::now() + kSpin;
    for (int there = 0;;) {
      mpi_.check(mpi_.iprobe(from, kTag, comm_, &there, MPI_STATUS_IGNORE), "probe");
      if (there != 0) return;
      if (std::chrono::steady_clock::now() > spin_until) std::this_thread::sleep_for(kRest);
    }
  }

  Library& mpi_;
  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  std::vector<int> counts_, offsets_;
  Traffic traffic_;
};

// Between all processes of the job, under a tag of their own. What fails is as silent as a rank that hangs.
class MpiPost final : public Post {
 public:
  MpiPost() : mpi_(opened()) {
    int size = 0;
    mpi_.check(mpi_.comm_size(mpi_.world, &size), "size");
    sent_.resize(static_cast<size_t>(size));
  }

  void send(int to, Note note) override {
    Sent& last = sent_[static_cast<size_t>(to)];
    int gone = 1;
    if (last.request != nullptr) mpi_.test(&last.request, &gone, MPI_STATUS_IGNORE);
    if (gone == 0) return;
    last.note = note;
    mpi_.isend(&last.note, 1, mpi_.byte, to, kNoteTag, mpi_.world, &last.request);
  }

  std::optional<Note> take(int from) override {
    int there = 0;
    int failed = mpi_.iprobe(from, kNoteTag, mpi_.world, &there, MPI_STATUS_IGNORE);
    if (failed != MPI_SUCCESS || there == 0) return std::nullopt;
    Note note{};
    failed = mpi_.recv(&note, 1, mpi_.byte, from, kNoteTag, mpi_.world, MPI_STATUS_IGNORE);
    return failed == MPI_SUCCESS ? std::optional(note) : std::nullopt;
  }

 private:
  struct Sent {
    MPI_Request request = nullptr;  // none: MPI has done with `note`
    Note note{};
  };

  Library& mpi_;
  std::vector<Sent> sent_;  // by rank; its memory stays where it is
};

}  // namespace

std::unique_ptr<Post> make_mpi_post() {
  if (!opened().many_threads) return nullptr;
  return std::make_unique<MpiPost>();
}

std::unique_ptr<Communicator> make_mpi_world() {
  Library& mpi = opened();
  if (mpi.started) throw_error(ErrorCode::kInternal, "MPI was started before in this process");
  int provided = 0;
  // A rank that waits gives its core away: another one, or a thread of one, may want it to get on. mpirun
  // asks for this only where ranks are more than cores, whatever else runs on these.
  setenv("OMPI_MCA_mpi_yield_when_idle", "1", /*overwrite=*/0);
  // The engine's thread makes the calls, and the main thread before and after it.
  mpi.check(mpi.init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "init");
  mpi.started = true;
  mpi.many_threads = provided >= MPI_THREAD_MULTIPLE;
  if (provided < MPI_THREAD_SERIALIZED) {
    throw_error(ErrorCode::kUnsupported, "MPI: thread level {}, expected at least MPI_THREAD_SERIALIZED",
                provided);
  }
  auto world = std::make_unique<MpiCommunicator>(mpi.world);
  const char* const said = std::getenv("MILLRACE_RANK_DELAY");
  const Claim delay{"MILLRACE_RANK_DELAY", said == nullptr ? "" : said};
  check_agreement(*world, {&delay, 1});  // who delays does not understand those who do not
  const std::optional<LinkDelay> link = parse_link_delay(delay.name, delay.value);
  if (!link) return world;
  return make_delayed(std::move(world), *link);
}

void abort_mpi(int status) noexcept {
  Library& mpi = library();
  if (!mpi.started || mpi.ended.exchange(true)) return;
  mpi.abort(mpi.world, status);
}

std::string describe_mpi() {
  Library& mpi = library();
  if (!mpi.fault.empty()) return fmt::format("none: {}", mpi.fault);
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  mpi.get_library_version(text, &length);
  const std::string_view version(text, static_cast<size_t>(length));
  return std::string(version.substr(0, version.find(',')));
}

}  // namespace millrace::dist

#else

namespace millrace::dist {

std::unique_ptr<Communicator> make_mpi_world() {
  throw_error(ErrorCode::kUnsupported, "this build has no MPI: install libopenmpi-dev and build again");
}
std::unique_ptr<Post> make_mpi_post() { return nullptr; }
void abort_mpi(int /*status*/) noexcept {}
std::string describe_mpi() { return "none: this build has no MPI"; }

}  // namespace millrace::dist

#endif

namespace millrace::dist {

bool started_by_mpi() {
  return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr || std::getenv("PMIX_RANK") != nullptr ||
         std::getenv("PMI_RANK") != nullptr;
}

int launched_rank() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}) {
    if (const char* const rank = std::getenv(name)) return std::atoi(rank);
  }
  return 0;
}

}  // namespace millrace::dist
