// Any bytes as a safetensors file: an Error, or tensors that can all be read.
#include <cstddef>
#include <cstdint>

#include "base/error.h"
#include "io/safetensors.h"
#include "touch.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using millrace::io::Safetensors;
  try {
    const Safetensors file = Safetensors::parse({reinterpret_cast<const std::byte*>(data), size}, "input");
    if (file.copied_bytes() > size) __builtin_trap();
    for (const millrace::TensorView& tensor : file.tensors()) {
      if (file.find_tensor(tensor.name) != &tensor) __builtin_trap();
      millrace::fuzz::touch(tensor);
    }
  } catch (const millrace::Error& error) {
    millrace::fuzz::check_message(error.what());
  }
  return 0;
}
