#include "engine/rank_process.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <csignal>
#include <memory>
#include <new>
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

// The front has something against this rank, names it and says what: nothing is left to say.
struct Refused : Error {
  using Error::Error;
};

dist::Socket connect_to_front(const FrontAddress& front) {
  try {
    return dist::connect_to(front.host, front.port);
  } catch (const Error& error) {
    throw_error(error.code(), "{}; --front-address names an address that all hosts reach the front by",
                error.what());
  }
}

dist::Socket say_hello(const FrontAddress& front, const dist::Hello& hello) {
  dist::Socket socket = connect_to_front(front);
  const bool said = socket.send_line(to_line(hello));
  const std::optional<std::string> answer = said ? socket.recv_line() : std::nullopt;
  if (!answer) throw_error(ErrorCode::kIo, "the front does not know it");
  if (!answer->empty()) throw Refused(ErrorCode::kBadInput, *answer);
  return socket;
}

// Of the weights, in bytes.
struct LoadedBytes {
  std::atomic<uint64_t> done{0}, all{0};
};

// Says twice a second that this process lives, and what went over its links. When the front does not listen
// any more there is nobody to compute for: the process ends, whatever it waits for.
class Beats {
 public:
  // What is watched must outlive it.
  Beats(dist::Socket socket, const dist::Watch& watch, const LoadedBytes& loaded)
      : socket_(std::move(socket)), watch_(watch), loaded_(loaded), thread_([this] { run(); }) {}
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
      beat.loaded = loaded_.done.load(std::memory_order_relaxed);
      beat.to_load = loaded_.all.load(std::memory_order_relaxed);
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
  const LoadedBytes& loaded_;
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

// Rank 0: what the front asks for, done by all ranks.
class FrontServer {
 public:
  FrontServer(const dist::Socket& front, const RankGroups& groups, const dist::Shares& shares,
              Backend& backend, Model& model)
      : front_(front), groups_(groups), shares_(shares), backend_(backend), model_(model) {}

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
        executor_ = make_leader(groups_, shares_, spec_, backend_);
        pipeline_ = dynamic_cast<PipelineLeader*>(executor_.get());
        const std::byte made{1};
        return front_.send({&made, 1});
      }
      case Kind::kStep:
        batch_.unpack(bytes_, spec_);
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
  const RankGroups& groups_;
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

void compute_for(const FrontAddress& address, const EngineOptions& options, const std::string& key) {
  dist::Watch watch;
  LoadedBytes loaded;
  const std::unique_ptr<dist::Communicator> group = dist::make_watched(dist::make_mpi_world(), watch);
  const io::Checkpoint checkpoint = io::Checkpoint::open(options.model);
  const ModelConfig config = read_config(checkpoint);
  check_stages(config, options);
  AdapterSet adapters = read_adapters(options, checkpoint, config);
  const dist::Shares shares =
      shares_of(with_measured_speeds(options, *group, checkpoint), group->rank(), checkpoint, config);
  const RankGroups groups(*group, shares);
  const HostPlace place = place_on_host(*group);
  const ChosenBackend chosen = open_backend(
      checkpoint, config, options, {}, {groups.of_stage(), &shares, place.local_rank, place.local_ranks});
  dist::Hello hello{.key = key,
                    .host = host_name(),
                    .rank = group->rank(),
                    .ranks = group->size(),
                    .pid = getpid(),
                    .claims = rank_claims(checkpoint, config, options, adapters, *chosen.backend)};
  const Beats beats(say_hello(address, hello), watch, loaded);
  dist::Socket orders;
  if (group->rank() == 0) {
    hello.data = true;
    orders = say_hello(address, hello);
  }
  measure_links(*group, watch);  // beats tell if one is down
  const std::unique_ptr<Model> model =
      load_part(checkpoint, std::move(adapters), *chosen.backend, [&](size_t done, size_t all) {
        loaded.done.store(done, std::memory_order_relaxed);
        loaded.all.store(all, std::memory_order_relaxed);
      });
  if (options.lock) lock_memory();
  if (group->rank() == 0) {
    FrontServer(orders, groups, shares, *chosen.backend, *model).run();
  } else {
    follow(groups, *chosen.backend, *model);
  }
}

}  // namespace

bool run_rank(const EngineOptions& options, const std::string& front, const std::string& key) {
  // A launcher that is killed takes this process with it, also one that has been stopped.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::signal(SIGTERM, SIG_DFL);  // there is nothing to bring to an end: the front has the clients
  check_options(options);
  const FrontAddress address = parse_front(front);
  const auto named = [](const char* why) {
    return fmt::format("rank {} on {}: {}", dist::launched_rank(), host_name(), why);
  };
  try {
    compute_for(address, options, key);
    return true;
  } catch (const Refused&) {
    return false;
  } catch (const Error& error) {
    throw Error(error.code(), named(error.what()));
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kNoMemory, named("out of memory: a smaller --ctx or a smaller model may fit"));
  }
}

}  // namespace millrace
