// Canonical composition (NFC), which Qwen's tokenizers apply before anything else, and decomposition (NFD),
// by which BERT's find accents.
#pragma once

#include <string>
#include <string_view>

namespace millrace {

// True when `text` is in NFC already; cheap, may say false for text that is.
bool is_nfc(std::string_view text);
// Bytes that are not UTF-8 stay as they are and stop composition.
std::string to_nfc(std::string_view text);
// Of text known to be well-formed.
std::string to_nfd(std::string_view text);

}  // namespace millrace
