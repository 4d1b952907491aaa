// Digest by OpenSSL's EVP functions, which use the processor's own instructions.
#include <fmt/core.h>
#include <openssl/evp.h>

#include <array>

#include "base/error.h"
#include "hub/digest.h"

namespace millrace::hub {
namespace {

class EvpDigest final : public Digest {
 public:
  explicit EvpDigest(const EVP_MD* kind) : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    if (!context_ || EVP_DigestInit_ex(context_.get(), kind, nullptr) != 1) failed();
  }
  void update(std::span<const std::byte> bytes) override {
    if (EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) != 1) failed();
  }
  std::string hex() override {
    std::array<unsigned char, EVP_MAX_MD_SIZE> sum{};
    unsigned length = 0;
    if (EVP_DigestFinal_ex(context_.get(), sum.data(), &length) != 1) failed();
    std::string text;
    for (unsigned i = 0; i < length; ++i) text += fmt::format("{:02x}", sum[i]);
    return text;
  }

 private:
  [[noreturn]] static void failed() {
    throw_error(ErrorCode::kInternal, "OpenSSL refuses to compute a hash");
  }
  std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context_;
};

}  // namespace

std::unique_ptr<Digest> make_sha256() { return std::make_unique<EvpDigest>(EVP_sha256()); }

std::unique_ptr<Digest> make_blob_sha1(uint64_t size) {
  auto digest = std::make_unique<EvpDigest>(EVP_sha1());
  const std::string head = fmt::format("blob {}", size);
  digest->update(std::as_bytes(std::span(head.c_str(), head.size() + 1)));  // with the zero at its end
  return digest;
}

}  // namespace millrace::hub
