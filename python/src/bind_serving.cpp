// The server inside the process: on a thread of its own, until it is stopped.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <future>
#include <memory>
#include <string>
#include <thread>

#include "errors.h"
#include "loaded_model.h"
#include "module_parts.h"
#include "option_names.h"
#include "server/server.h"

namespace nb = nanobind;

namespace millrace::python {
namespace {

class Serving {
 public:
  // Returns when it listens. Throws Error when it cannot.
  Serving(std::shared_ptr<LoadedModel> model, const server::ServerOptions& options)
      : model_(std::move(model)), options_(options) {
    std::promise<std::string> listening;
    std::future<std::string> url = listening.get_future();
    thread_ = std::jthread([this, listening = std::move(listening)](const std::stop_token& stop) mutable {
      run(listening, stop);
    });
    url_ = url.get();
  }
  // What is under way is finished (options' drain_timeout_s).
  void stop() {
    thread_.request_stop();
    if (thread_.joinable()) thread_.join();
  }
  const std::string& url() const { return url_; }
  bool running() const { return thread_.joinable(); }

 private:
  void run(std::promise<std::string>& listening, const std::stop_token& stop) {
    bool told = false;
    try {
      server::serve_inside(
          model_->models(), options_,
          [&](const std::string& url) {
            told = true;
            listening.set_value(url);
          },
          stop);
    } catch (...) {
      if (!told) listening.set_exception(std::current_exception());
    }
  }

  const std::shared_ptr<LoadedModel> model_;
  const server::ServerOptions options_;
  std::string url_;
  std::jthread thread_;  // the last: it uses all of the above
};

}  // namespace

void bind_serving(nb::module_& m) {
  nb::class_<Serving>(m, "Serving")
      .def_prop_ro("url", &Serving::url)
      .def_prop_ro("running", &Serving::running)
      .def("stop", &Serving::stop, nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "serve",
      [](const std::shared_ptr<LoadedModel>& model, const std::vector<std::string>& words) {
        const server::ServerOptions options = parse_server_options(words);
        const nb::gil_scoped_release unlocked;
        return std::make_unique<Serving>(model, options);
      },
      nb::arg("model"), nb::arg("words"));
}

}  // namespace millrace::python
