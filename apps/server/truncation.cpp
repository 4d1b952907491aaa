#include "truncation.h"

#include <algorithm>

#include "api_error.h"

namespace millrace::server {
namespace {

struct Piece {  // messages that stay or go together: [first, last)
  size_t first = 0, last = 0;
};

bool is_kept(const chat::Message& message) { return message.role == "system" || message.role == "developer"; }

// What may be left out, in the order in which it is.
std::vector<Piece> pieces_of(const std::vector<chat::Message>& messages) {
  size_t last_user = messages.size();
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].role == "user") last_user = i;
  }
  std::vector<Piece> pieces;
  const auto add = [&](size_t i, bool begins) {
    if (begins || pieces.empty() || pieces.back().last != i) {
      pieces.push_back({.first = i, .last = i + 1});
    } else {
      pieces.back().last = i + 1;
    }
  };
  // Before the last question whole turns, from one question to the next: templates insist on their order.
  const size_t before = std::min(last_user, messages.size());
  for (size_t i = 0; i < before; ++i) {
    if (!is_kept(messages[i])) add(i, messages[i].role == "user");
  }
  // Behind it calls with their results, but for what comes last.
  for (size_t i = before + 1; i < messages.size(); ++i) {
    if (!is_kept(messages[i])) add(i, messages[i].role != "tool");
  }
  if (!pieces.empty() && pieces.back().last == messages.size() && pieces.back().first > last_user) {
    pieces.pop_back();
  }
  return pieces;
}

std::vector<chat::Message> without(const std::vector<chat::Message>& messages,
                                   const std::vector<Piece>& pieces, size_t count) {
  std::vector<chat::Message> left;
  size_t piece = 0;
  for (size_t i = 0; i < messages.size(); ++i) {
    while (piece < count && i >= pieces[piece].last) ++piece;
    if (piece < count && i >= pieces[piece].first) continue;
    left.push_back(messages[i]);
  }
  return left;
}

// What the prompt may take. An eighth of the context is an answer of some length; a quarter is given to those
// who ask for more.
size_t room_for_prompt(int32_t context, int32_t max_tokens) {
  const int32_t answer = max_tokens > 0 ? std::min(max_tokens, context / 4) : context / 8;
  return static_cast<size_t>(context - answer);
}

}  // namespace

void leave_out_by_bound(chat::Conversation& conversation,
                        const std::function<size_t(const chat::Message&)>& least_tokens, int32_t context,
                        int32_t max_tokens) {
  const std::vector<chat::Message>& messages = conversation.messages;
  const size_t room = room_for_prompt(context, max_tokens);
  std::vector<size_t> least;
  size_t sum = 0;
  for (const chat::Message& message : messages) {
    least.push_back(least_tokens(message));
    sum += least.back();
  }
  if (sum <= room) return;
  const std::vector<Piece> pieces = pieces_of(messages);
  size_t count = 0;
  for (; count < pieces.size() && sum > room; ++count) {
    for (size_t i = pieces[count].first; i < pieces[count].last; ++i) sum -= least[i];
  }
  conversation.messages = without(messages, pieces, count);
}

void truncate_to_fit(const chat::Format& format, chat::Conversation& conversation,
                     std::vector<int32_t>& tokens, int32_t context, int32_t max_tokens) {
  const size_t room = room_for_prompt(context, max_tokens);
  if (tokens.size() <= room) return;
  const std::vector<chat::Message> all = conversation.messages;
  const std::vector<Piece> pieces = pieces_of(all);
  const auto drop = [&](size_t count) {
    conversation.messages = without(all, pieces, count);
    tokens = format.prompt(conversation, most_counted(context));
    return tokens.size() <= room;
  };
  // The fewest that have to go; each try is a prompt of its own, so they are found by halving.
  size_t low = 0, high = pieces.size();
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (drop(middle)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  drop(low);
}

}  // namespace millrace::server
