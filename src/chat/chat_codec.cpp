#include "chat/chat_codec.h"

namespace millrace::chat {

int32_t Codec::find_special(std::string_view name) const {
  const std::vector<int32_t> ids = encode(name, true);
  return ids.size() == 1 && is_special(ids[0]) ? ids[0] : -1;
}

}  // namespace millrace::chat
