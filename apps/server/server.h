// serve: listens until a signal ends it, or whoever runs it in a program of their own does.
#pragma once

#include <functional>
#include <stop_token>
#include <string>

#include "model_set.h"
#include "options.h"

namespace millrace::server {

// Answers requests until SIGINT or SIGTERM; then what is under way is finished (at most drain_timeout_s; a
// second signal ends it at once). SIGHUP reads the keys again, and looks for models. `listening` is called
// once with the address, as a URL. At the end the models are stopped (ModelSet::stop). Throws Error when it
// cannot listen, or when a file of the options cannot be read.
void serve(ModelSet& models, const ServerOptions& options,
           const std::function<void(const std::string& url)>& listening);

// The same inside another program, until `stop` is asked for: signals, limits and the end of the process are
// that program's, and the models stay as they are.
void serve_inside(ModelSet& models, const ServerOptions& options,
                  const std::function<void(const std::string& url)>& listening, const std::stop_token& stop);

}  // namespace millrace::server
