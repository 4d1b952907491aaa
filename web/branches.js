// A conversation is a tree: asking again or differently begins a branch beside the old one, and nothing is overwritten.
// Each message names its parent, and each parent the child that is shown, so that the path from the first message on
// is what the reader sees.
//   conversation  { ..., first, messages }    first: id of the message that the path begins with, or null
//   message       { id, parent, next, ... }   parent, next: ids, or null

let count = 0;
export const newId = () => `${Date.now().toString(36)}-${(count++).toString(36)}${Math.random().toString(36).slice(2, 7)}`;

const find = (conversation, id) => conversation.messages.find((message) => message.id === id) ?? null;

export const parentOf = (conversation, message) => find(conversation, message.parent);

// The messages that are shown, in order.
export function pathOf(conversation) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  const path = [];
  for (let at = byId.get(conversation.first); at && path.length <= byId.size; at = byId.get(at.next)) path.push(at);
  return path;
}

// Messages that stand at the same place: the same parent, the same role. Oldest first.
export function siblingsOf(conversation, message) {
  return conversation.messages.filter((one) => one.parent === message.parent && one.role === message.role);
}

// Shows this message, and below it what was last shown there.
export function choose(conversation, message) {
  const parent = parentOf(conversation, message);
  if (parent) parent.next = message.id;
  else conversation.first = message.id;
}

// Adds a message below `parent` (null: at the beginning) and shows it.
export function add(conversation, message, parent) {
  Object.assign(message, { id: message.id ?? newId(), parent: parent?.id ?? null, next: null });
  conversation.messages.push(message);
  choose(conversation, message);
  return message;
}

// Takes a message out that nothing was said to; another of its place is shown instead.
export function drop(conversation, message) {
  const beside = siblingsOf(conversation, message).filter((one) => one !== message);
  conversation.messages = conversation.messages.filter((one) => one !== message);
  if (beside.length) return choose(conversation, beside.at(-1));
  const parent = parentOf(conversation, message);
  if (parent) parent.next = null;
  else conversation.first = null;
}

// Conversations of older versions were lists, with the results of calls as messages of their own.
export function upgrade(conversation) {
  if (conversation.messages.every((message) => typeof message.id === "string")) return conversation;
  const old = conversation.messages;
  const upgraded = { ...conversation, messages: [], first: null };
  let last = null;
  for (const message of old) {
    if (message.role !== "tool") last = add(upgraded, { ...message }, last);
    else {
      const call = last?.toolCalls?.find(({ id }) => id === message.toolCallId);
      if (call) call.result = { content: message.content, isError: false };
    }
  }
  return upgraded;
}
