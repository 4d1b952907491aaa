// Ranks that are threads of the test's process.
#pragma once

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "dist/local_communicator.h"
#include "engine/rank_group.h"

namespace millrace::test {

// body(rank 0's communicator), with the other ranks following in threads of their own. What a rank throws is
// thrown here, rank 0's before the others'. `wrap`: what each rank makes of its communicator.
inline void with_ranks(
    int ranks, const std::vector<EngineOptions>& options_of,
    const std::function<void(std::shared_ptr<dist::Communicator>)>& body,
    const std::function<std::unique_ptr<dist::Communicator>(std::unique_ptr<dist::Communicator>)>& wrap =
        {}) {
  auto group = dist::make_local_group(ranks);
  for (auto& rank : group) {
    if (wrap) rank = wrap(std::move(rank));
  }
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> faults(static_cast<size_t>(ranks));
  for (size_t r = 1; r < faults.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        follow_rank_zero(options_of[std::min(r, options_of.size() - 1)], *group[r]);
      } catch (...) {
        faults[r] = std::current_exception();
      }
      group[r].reset();
    });
  }
  try {
    body(std::shared_ptr<dist::Communicator>(std::move(group[0])));
  } catch (...) {
    faults[0] = std::current_exception();
  }
  for (std::thread& t : threads) t.join();
  for (const std::exception_ptr& fault : faults) {
    if (fault != nullptr) std::rethrow_exception(fault);
  }
}

}  // namespace millrace::test
