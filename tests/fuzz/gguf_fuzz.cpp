// Any bytes as a GGUF file: an Error, or metadata and tensors that can all be read.
#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>

#include "base/error.h"
#include "io/gguf.h"
#include "touch.h"

namespace {

// Every getter on every key: wrong types are Errors as well.
template <class Get>
void try_get(Get get) {
  try {
    get();
  } catch (const millrace::Error&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using millrace::io::Gguf;
  try {
    const Gguf gguf = Gguf::parse({reinterpret_cast<const std::byte*>(data), size}, "input");
    for (const auto& [key, value] : gguf.metadata()) {
      try_get([&, &name = key] { gguf.get_int(name); });
      try_get([&, &name = key] { gguf.get_real(name, 0); });
      try_get([&, &name = key] { gguf.get_bool(name, false); });
      try_get([&, &name = key] { millrace::fuzz::touch(gguf.get_string(name)); });
      try_get([&, &name = key] {
        for (const std::string_view text : gguf.get_array(name)->strings) millrace::fuzz::touch(text);
      });
    }
    for (const millrace::TensorView& tensor : gguf.tensors()) {
      if (gguf.find_tensor(tensor.name) != &tensor) __builtin_trap();
      millrace::fuzz::touch(tensor);
    }
  } catch (const millrace::Error& error) {
    millrace::fuzz::check_message(error.what());
  }
  return 0;
}
