#include "engine/rank_process.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#include "base/error.h"
#include "dist/mpi_communicator.h"
#include "dist/rank_link.h"
#include "dist/watched_communicator.h"
#include "engine/engine_options.h"
#include "engine/leader_executor.h"
#include "engine/lock_memory.h"
#include "engine/open_backend.h"
#include "engine/pipeline_executor.h"
#include "engine/rank_group.h"

namespace millrace {
namespace {

using Kind = RankMessage::Kind;

struct FrontAddress {
  std::string host;
  uint16_t port = 0;
};

FrontAddress parse_front(const std::string& front) {
  const size_t colon = front.rfind(':');
  FrontAddress address{front.substr(0, colon), 0};
  const char* const end = front.data() + front.size();
  const char* const digits = colon == std::string::npos ? end : front.data() + colon + 1;
  const auto [parsed, error] = std::from_chars(digits, end, address.port);
  if (error != std::errc() || parsed != end || address.host.empty()) {
    throw_error(ErrorCode::kBadInput, "--front: found {}, expected HOST:PORT", front);
  }
  return address;
}

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof(name) - 1);
  return name;
}

dist::Socket say_hello(const FrontAddress& front, const dist::Hello& hello) {
  dist::Socket socket = dist::connect_to(front.host, front.port);
  const bool said = socket.send_line(to_line(hello));
  const std::optional<std::string> answer = said ? socket.recv_line() : std::nullopt;
  if (!answer) throw_error(ErrorCode::kIo, "rank {}: the front does not know it", hello.rank);
  if (!answer->empty()) throw_error(ErrorCode::kBadInput, "{}", *answer);
  return socket;
}

// Says twice a second that this process lives, and what went over its links. When the front does not listen
// any more there is nobody to compute for: the process ends, whatever it waits for.
class Beats {
 public:
  Beats(dist::Socket socket, const dist::Watch& watch)
      : socket_(std::move(socket)), watch_(watch), thread_([this] { run(); }) {}
  ~Beats() {
    ending_ = true;
    socket_.shut_down();
    thread_.join();
  }
  Beats(const Beats&) = delete;
  Beats& operator=(const Beats&) = delete;

 private:
  void run() {
    while (!ending_) {
      dist::Beat beat;
      beat.waiting_s = watch_.waiting_s();
      beat.calls = watch_.calls.load(std::memory_order_relaxed);
      for (size_t r = 0; r < beat.sent.size(); ++r) {
        beat.sent[r] = watch_.sent[r].load(std::memory_order_relaxed);
        beat.received[r] = watch_.received[r].load(std::memory_order_relaxed);
        beat.latency_s[r] = watch_.latency_s[r].load(std::memory_order_relaxed);
        beat.bytes_per_s[r] = watch_.bytes_per_s[r].load(std::memory_order_relaxed);
      }
      const bool sent = socket_.send(std::as_bytes(std::span(&beat, 1)));
      // The front says nothing here: what can be read is the connection's end.
      if (!sent || socket_.readable(static_cast<int>(dist::kBeatSeconds * 1000))) {
        if (!ending_) _exit(1);
        return;
      }
    }
  }

  const dist::Socket socket_;
  const dist::Watch& watch_;
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

// Rank 0: what the front asks for, done by all ranks.
class FrontServer {
 public:
  FrontServer(const dist::Socket& front, dist::Communicator& group, const dist::Shares& shares,
              Backend& backend, Model& model)
      : front_(front), group_(group), shares_(shares), backend_(backend), model_(model) {}

  // Until the front ends the connection.
  void run() {
    RankMessage message;
    while (front_.recv(std::as_writable_bytes(std::span(&message, 1)))) {
      bytes_.resize(message.bytes);
      if (!front_.recv(bytes_) || !act(message)) return;
    }
  }

 private:
  // False: the connection has ended.
  bool act(const RankMessage& message) {
    switch (message.kind) {
      case Kind::kStop:
        return false;
      case Kind::kMakeExecutor: {
        spec_ = unpacked_spec(bytes_);
        model_.settle_context(spec_.max_context);
        executor_ = make_leader(group_, shares_, spec_, backend_);
        pipeline_ = dynamic_cast<PipelineLeader*>(executor_.get());
        const std::byte made{1};
        return front_.send({&made, 1});
      }
      case Kind::kStep:
        batch_.unpack(bytes_, spec_.kv_groups.size());
        forward_in_parts(model_, *executor_, pipeline_, batch_.view());
        return true;
      case Kind::kLogits:
        return front_.send(std::as_bytes(executor_->logits()));
      case Kind::kGreedy: {
        const std::span<const int32_t> found = executor_->greedy_tokens();
        const auto count = static_cast<int32_t>(found.size());
        return front_.send(std::as_bytes(std::span(&count, 1))) && front_.send(std::as_bytes(found));
      }
      case Kind::kSample: {
        rows_.unpack(bytes_);
        tokens_.clear();
        if (executor_->sample(rows_.rows)) {
          for (const SampledRow& row : executor_->sampled()) tokens_.push_back(row.token);
        }
        const auto count = static_cast<int32_t>(tokens_.size());
        return front_.send(std::as_bytes(std::span(&count, 1))) &&
               front_.send(std::as_bytes(std::span(tokens_)));
      }
      case Kind::kHidden:
        return front_.send(std::as_bytes(hidden_states()));
      case Kind::kReadBlock:
        bytes_.resize(spec_.kv_block_bytes(message.group));
        executor_->read_block(message.group, message.from, bytes_);
        executor_->finish_reads();
        return front_.send(bytes_);
      case Kind::kWriteBlock:
        executor_->write_block(message.group, message.to, bytes_);
        return true;
      case Kind::kCopyBlock:
        executor_->copy_block(message.group, message.from, message.to);
        return true;
    }
    return false;
  }

  std::span<const float> hidden_states() {
    const auto hidden = static_cast<size_t>(spec_.hidden);
    hidden_.resize(batch_.tokens.size() * hidden);
    for (size_t row = 0; row < batch_.tokens.size(); ++row) {
      model_.read_hidden(*executor_, static_cast<int32_t>(row),
                         std::span(hidden_).subspan(row * hidden, hidden));
    }
    return hidden_;
  }

  const dist::Socket& front_;
  dist::Communicator& group_;
  const dist::Shares& shares_;
  Backend& backend_;
  Model& model_;
  ExecutorSpec spec_;
  std::unique_ptr<Executor> executor_;
  PipelineLeader* pipeline_ = nullptr;
  ReceivedBatch batch_;
  ReceivedRows rows_;
  std::vector<int32_t> tokens_;
  std::vector<float> hidden_;
  std::vector<std::byte> bytes_;
};

}  // namespace

void run_rank(const EngineOptions& options, const std::string& front, const std::string& key) {
  // A launcher that is killed takes this process with it, also one that has been stopped.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  check_options(options);
  const FrontAddress address = parse_front(front);
  dist::Watch watch;
  const std::unique_ptr<dist::Communicator> group = dist::make_watched(dist::make_mpi_world(), watch);
  const io::Checkpoint checkpoint = io::Checkpoint::open(options.model);
  const ModelConfig config = read_config(checkpoint);
  check_stages(config, options);
  const dist::Shares shares = shares_of(options, group->rank(), checkpoint, config);
  const HostPlace place = place_on_host(*group);
  const ChosenBackend chosen = open_backend(
      checkpoint, config, options, {},
      {shares.stages() > 1 ? nullptr : group.get(), &shares, place.local_rank, place.local_ranks});
  dist::Hello hello{.key = key,
                    .host = host_name(),
                    .rank = group->rank(),
                    .ranks = group->size(),
                    .pid = getpid(),
                    .claims = rank_claims(checkpoint, config, options, *chosen.backend)};
  const Beats beats(say_hello(address, hello), watch);
  dist::Socket orders;
  if (group->rank() == 0) {
    hello.data = true;
    orders = say_hello(address, hello);
  }
  measure_links(*group, watch);  // beats tell if one is down
  const std::unique_ptr<Model> model = Model::load(checkpoint, *chosen.backend);
  if (options.lock) lock_memory();
  if (group->rank() == 0) {
    FrontServer(orders, *group, shares, *chosen.backend, *model).run();
  } else {
    follow(*group, *chosen.backend, *model);
  }
}

}  // namespace millrace
