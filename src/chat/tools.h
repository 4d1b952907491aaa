// What every format asks about a conversation's tools.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "chat/format.h"
#include "chat/plan_constraint.h"

namespace millrace::chat {

bool offers_tools(const Conversation& conversation);  // there are some, and the model may call them

// Throws Error{kBadInput} for a choice that names no tool, or wants one where there are none.
void check_tool_choice(const Conversation& conversation);

// Those the choice leaves: all, those it allows, or the one it names.
std::vector<const Tool*> callable_tools(const Conversation& conversation);

bool must_call(const Conversation& conversation);  // required or named

// The model may call or not, and its calls are held to something: strict tools, or some of those it knows.
bool holds_free_calls(const Conversation& conversation);

// The answer is held to something for its tools: a call, none, or what its calls look like.
bool holds_tools(const Conversation& conversation);

// More than one call may be made: not where one is named.
bool many_calls(const Conversation& conversation);

// What a call's arguments are held to; null when they are free (no strict tool, and the choice is the
// model's). A schema outside the grammar's subset is an Error for a strict tool and any JSON object for the
// others.
std::shared_ptr<const grammar::Grammar> arguments_grammar(const Grammars& grammars, const Tool& tool,
                                                          const Conversation& conversation);

}  // namespace millrace::chat
