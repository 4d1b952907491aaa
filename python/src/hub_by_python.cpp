// What src/hub asks for in http_client.h and digest.h, by Python's own library (python/millrace/_fetch.py): a
// wheel fetches models on every machine, and brings neither libcurl nor OpenSSL for it. These definitions
// stand in the place of those in src/hub/curl, which the linker then leaves out.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hub/digest.h"
#include "hub/http_client.h"

namespace nb = nanobind;

namespace millrace::hub {
namespace {

nb::object fetch_module() { return nb::module_::import_("millrace._fetch"); }

// An object of Python's, called by threads that do not hold the GIL.
class Held {
 public:
  explicit Held(nb::object object) : object_(std::move(object)) {}
  ~Held() {
    const nb::gil_scoped_acquire gil;
    object_.reset();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  const nb::object& get() const { return object_; }

 private:
  nb::object object_;
};

std::unique_ptr<Held> made(const char* name) {
  const nb::gil_scoped_acquire gil;
  return std::make_unique<Held>(fetch_module().attr(name)());
}

class PythonClient final : public HttpClient {
 public:
  PythonClient() : transfers_(made("Transfers")) {}
  ~PythonClient() override {
    const nb::gil_scoped_acquire gil;
    try {
      transfers_->get().attr("close")();
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("millrace: closing requests");
    }
  }
  PythonClient(const PythonClient&) = delete;
  PythonClient& operator=(const PythonClient&) = delete;

  int begin(HttpQuery query) override {
    const nb::gil_scoped_acquire gil;
    transfers_->get().attr("begin")(++last_, query.url, query.head, query.headers);
    running_[last_] = {std::move(query), {}};
    return last_;
  }

  void stop(int number) override {
    if (running_.erase(number) == 0) return;
    const nb::gil_scoped_acquire gil;
    transfers_->get().attr("stop")(number);
  }

  std::vector<Finished> wait(int wait_ms) override {
    const nb::gil_scoped_acquire gil;
    std::vector<Finished> finished;
    const nb::object events = transfers_->get().attr("wait")(wait_ms / 1e3);
    for (const nb::handle event : events) take(event, finished);
    return finished;
  }

 private:
  struct Transfer {
    HttpQuery query;
    HttpAnswer answer;
  };

  void take(nb::handle event, std::vector<Finished>& finished) {
    const int number = nb::cast<int>(event.attr("number"));
    const auto found = running_.find(number);
    if (found == running_.end()) return;  // stopped by on_body
    HttpAnswer& answer = found->second.answer;
    const auto kind = nb::cast<std::string>(event.attr("kind"));
    bool ends = kind == "end";
    if (kind == "head") {
      answer.status = nb::cast<int>(event.attr("status"));
      for (const auto [name, value] : nb::cast<nb::dict>(event.attr("headers")))
        answer.headers[nb::cast<std::string>(name)] = nb::cast<std::string>(value);
    } else if (kind == "data") {
      if (!found->second.query.on_body) return;
      const nb::object data = event.attr("data");
      if (hand_over(found->second, nb::cast<nb::bytes>(data))) return;
      transfers_->get().attr("stop")(number);
      ends = true;
    }
    if (!ends) return;
    answer.error = nb::cast<std::string>(event.attr("error"));
    answer.unreachable = nb::cast<bool>(event.attr("unreachable"));
    finished.push_back({number, std::move(answer)});
    running_.erase(found);
  }

  static bool hand_over(const Transfer& transfer, const nb::bytes& data) {
    const auto* begin = reinterpret_cast<const std::byte*>(data.c_str());
    const size_t size = data.size();
    const nb::gil_scoped_release unlocked;  // it may wait for the thread that hashes
    return transfer.query.on_body(transfer.answer, {begin, size});
  }

  const std::unique_ptr<Held> transfers_;
  int last_ = 0;
  std::map<int, Transfer> running_;
};

class PythonDigest final : public Digest {
 public:
  explicit PythonDigest(std::unique_ptr<Held> digest) : digest_(std::move(digest)) {}
  void update(std::span<const std::byte> bytes) override {
    const nb::gil_scoped_acquire gil;
    digest_->get().attr("update")(nb::bytes(bytes.data(), bytes.size()));
  }
  std::string hex() override {
    const nb::gil_scoped_acquire gil;
    return nb::cast<std::string>(digest_->get().attr("hexdigest")());
  }

 private:
  const std::unique_ptr<Held> digest_;
};

}  // namespace

std::string why_no_network() { return {}; }

std::unique_ptr<HttpClient> make_http_client() { return std::make_unique<PythonClient>(); }

std::unique_ptr<Digest> make_sha256() { return std::make_unique<PythonDigest>(made("sha256")); }

std::unique_ptr<Digest> make_blob_sha1(uint64_t size) {
  const nb::gil_scoped_acquire gil;
  return std::make_unique<PythonDigest>(std::make_unique<Held>(fetch_module().attr("blob_sha1")(size)));
}

}  // namespace millrace::hub
