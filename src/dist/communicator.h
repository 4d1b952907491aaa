// Communicator: how the ranks of a group exchange bytes. One object per rank; a group's collective calls are
// made by all of its ranks in the same order, and one thread of a rank at a time makes calls. Three kinds:
// `local` between threads of a process, `mpi` between processes and hosts, and `delayed`, which makes another
// one a slow link. Sums are done here, in rank order, and never by a library: a library chooses its order,
// and bits would follow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace millrace::dist {

// What went over the links so far. A collective counts as what it must move: an all_gather sends this rank's
// part to each of the others.
struct Traffic {
  uint64_t bytes_sent = 0, bytes_received = 0;
  uint64_t calls = 0;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual std::string_view name() const = 0;  // "local", "mpi", "delayed mpi"
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Messages between two ranks arrive in order; send and recv of one message name the same number of bytes.
  // send may wait for its recv: whoever exchanges uses send_recv, which does both at once (rings).
  virtual void send(int to, std::span<const std::byte> bytes) = 0;
  virtual void recv(int from, std::span<std::byte> bytes) = 0;
  virtual void send_recv(int to, std::span<const std::byte> out, int from, std::span<std::byte> in) = 0;

  // `all` becomes the parts of all ranks in rank order, bytes_of_rank[r] bytes of rank r, which may differ
  // and be 0.
  virtual void all_gather(std::span<const std::byte> mine, std::span<std::byte> all,
                          std::span<const size_t> bytes_of_rank) = 0;
  // out_bytes[r] bytes of `out` go to rank r, in_bytes[r] bytes of `in` come from it, in rank order.
  virtual void all_to_all(std::span<const std::byte> out, std::span<const size_t> out_bytes,
                          std::span<std::byte> in, std::span<const size_t> in_bytes) = 0;
  virtual void broadcast(int root, std::span<std::byte> bytes) = 0;
  virtual void barrier() = 0;

  // values = ((rank 0's + rank 1's) + rank 2's) + ..., the same bits on every rank.
  virtual void all_reduce(std::span<float> values);
  // The same sum, of which this rank gets its part: count_of_rank[r] values are rank r's, in rank order.
  virtual void reduce_scatter(std::span<const float> values, std::span<const size_t> count_of_rank,
                              std::span<float> mine);

  // The ranks that give the same colour become a group of their own, in the order of their keys (then of
  // their ranks).
  virtual std::unique_ptr<Communicator> split(int colour, int key) = 0;

  virtual Traffic traffic() const = 0;
};

// What a rank says about itself, of which all must agree, e.g. {"model file", "3f2a.."}: throws Error on
// every rank, with the ranks by name, unless all said the same. Lists must have the same names in the same
// order.
struct Claim {
  std::string name, value;
};
void check_agreement(Communicator& group, std::span<const Claim> claims);

// One string per rank, on every rank.
std::vector<std::string> all_gather_text(Communicator& group, std::string_view mine);
// The root's string, on every rank.
std::string broadcast_text(Communicator& group, int root, std::string_view text);

// A link as measured between this rank and another: half of a round trip of 8 bytes, and the rate of messages
// of `bytes` each way.
struct LinkSpeed {
  double latency_s = 0, bytes_per_s = 0;
};
// Collective: ranks a and b measure, the others wait; all get the result.
LinkSpeed measure_link(Communicator& group, int a, int b, size_t bytes);

}  // namespace millrace::dist
