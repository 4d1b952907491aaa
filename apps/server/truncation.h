// Conversations longer than the context: what is left out so that the rest fits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "chat/format.h"

namespace millrace::server {

// Leaves out the oldest turns, and within the last turn the oldest calls with their results, until `tokens`,
// the prompt of what is left, leaves room for an answer of max_tokens (0: of some length). Never left out:
// system and developer messages, the last message of the user, and what comes last. Then it may still be too
// long.
void truncate_to_fit(const chat::Format& format, chat::Conversation& conversation,
                     std::vector<int32_t>& tokens, int32_t context, int32_t max_tokens);

// The same by a bound, before anything is rendered or tokenized: leaves out what truncate_to_fit would leave
// out, as far as the fewest tokens that a message can take (`least_tokens`) tell. In linear time.
void leave_out_by_bound(chat::Conversation& conversation,
                        const std::function<size_t(const chat::Message&)>& least_tokens, int32_t context,
                        int32_t max_tokens);

}  // namespace millrace::server
