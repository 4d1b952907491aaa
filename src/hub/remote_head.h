// A model that is described before it is fetched.
#pragma once

#include <string>

#include "hub/puller.h"
#include "hub/settings.h"

namespace millrace::hub {

// The head of a model that is not here: files of the right sizes that hold what describes the tensors and
// holes for their data. Enough for a memory plan. Removed when the object goes.
class RemoteHead {
 public:
  RemoteHead(const PullPlan& plan, const Settings& settings);
  ~RemoteHead();
  RemoteHead(const RemoteHead&) = delete;
  RemoteHead& operator=(const RemoteHead&) = delete;
  const std::string& path() const { return path_; }  // to open

 private:
  void fetch(const PullPlan& plan, const Settings& settings);
  std::string folder_, path_;
};

}  // namespace millrace::hub
