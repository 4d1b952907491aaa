// Conversations and settings in the browser's storage. Each conversation is an entry of its own, so two tabs do not
// overwrite each other's.
//   conversation  { id, title, system, created, updated, messages }
//   message       { role: "user", content }
//               | { role: "assistant", content, reasoning, toolCalls: [{ id, name, arguments }], finish, stats, error }
//               | { role: "tool", toolCallId, content }

const kPrefix = "millrace.conversation.";
const kSettings = "millrace.settings";

const read = (key) => {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null; // somebody else's bytes under our name
  }
};

export const loadSettings = () => read(kSettings) ?? {};
export const saveSettings = (settings) => localStorage.setItem(kSettings, JSON.stringify(settings));

const isText = (value) => typeof value === "string";

function isMessage(message) {
  const calls = message?.toolCalls ?? [];
  return ["user", "assistant", "tool"].includes(message?.role) && isText(message.content) && isText(message.reasoning ?? "") &&
    Array.isArray(calls) && calls.every((call) => [call?.id, call?.name, call?.arguments].every(isText));
}

// What an imported file or an older version of this page may hold is not to be trusted further than this.
export function isConversation(value) {
  return isText(value?.id) && isText(value.title) && Number.isFinite(value.updated) && isText(value.system ?? "") &&
    Array.isArray(value.messages) && value.messages.every(isMessage);
}

// Newest first.
export function loadConversations() {
  return Object.keys(localStorage)
    .filter((key) => key.startsWith(kPrefix))
    .map(read)
    .filter(isConversation)
    .sort((a, b) => b.updated - a.updated);
}

export const loadConversation = (id) => [read(kPrefix + id)].find(isConversation) ?? null;
export const removeConversation = (id) => localStorage.removeItem(kPrefix + id);
export const isConversationKey = (key) => key === null || key.startsWith(kPrefix);

// Throws when the browser's storage is full.
export function saveConversation(conversation) {
  localStorage.setItem(kPrefix + conversation.id, JSON.stringify(conversation));
}

const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;

export function newConversation(system) {
  const now = Date.now();
  return { id: newId(), title: "New chat", system, created: now, updated: now, messages: [] };
}

export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

// Conversations of a file we exported. One that is here already comes in beside it, under an id of its own.
export function readExport(text) {
  const found = JSON.parse(text)?.conversations;
  if (!Array.isArray(found) || !found.every(isConversation)) throw new Error("this is no export of Millrace's chat");
  return found.map((one) => (loadConversation(one.id) ? { ...one, id: newId() } : one));
}

export const writeExport = (conversations) => JSON.stringify({ application: "millrace", conversations }, null, 2);
