// Conversations and settings in the browser's storage. Each conversation is an entry of its own, so two tabs do not
// overwrite each other's. branches.js says how messages hang together.
//   conversation  { id, title, named, system, model, settings, created, updated, first, messages }
//   message       { role: "user", content, attachments: [{ name, text, pages, image }] }
//               | { role: "assistant", content, reasoning, toolCalls: [{ id, name, arguments, result }], finish, stats, error }
//   result        { content, isError }
import { newId, pathOf, upgrade } from "./branches.js";

const kPrefix = "millrace.conversation.";
const kSettings = "millrace.settings";

export const read = (key) => {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null; // somebody else's bytes under our name
  }
};

export const loadSettings = () => read(kSettings) ?? {};
export const saveSettings = (settings) => localStorage.setItem(kSettings, JSON.stringify(settings));

const isText = (value) => typeof value === "string";
const isCall = (call) => [call?.id, call?.name, call?.arguments, call?.result?.content ?? ""].every(isText);
const isAttachment = (one) => isText(one?.name) && isText(one.text) && /^(data:image\/(png|jpeg);base64,[A-Za-z0-9+/=]*)?$/.test(one.image ?? "");

function isMessage(message) {
  const { toolCalls = [], attachments = [] } = message ?? {};
  return ["user", "assistant", "tool"].includes(message?.role) && isText(message.content) && isText(message.reasoning ?? "") &&
    Array.isArray(toolCalls) && toolCalls.every(isCall) && Array.isArray(attachments) && attachments.every(isAttachment);
}

// What an imported file or an older version of this page may hold is not to be trusted further than this.
export function isConversation(value) {
  return isText(value?.id) && isText(value.title) && Number.isFinite(value.updated) && isText(value.system ?? "") &&
    isText(value.model ?? "") && typeof (value.settings ?? {}) === "object" && Array.isArray(value.messages) && value.messages.every(isMessage);
}

// Newest first.
export function loadConversations() {
  return Object.keys(localStorage)
    .filter((key) => key.startsWith(kPrefix))
    .map(read)
    .filter(isConversation)
    .map(upgrade)
    .sort((a, b) => b.updated - a.updated);
}

export function loadConversation(id) {
  const found = read(kPrefix + id);
  if (!isConversation(found)) return null;
  const { system, ...settings } = loadSettings(); // an older version kept none with the conversation
  return { settings, ...upgrade(found) };
}

export const removeConversation = (id) => localStorage.removeItem(kPrefix + id);
export const isConversationKey = (key) => key === null || key.startsWith(kPrefix);

// Throws when the browser's storage is full.
export function saveConversation(conversation) {
  localStorage.setItem(kPrefix + conversation.id, JSON.stringify(conversation));
}

export function newConversation({ system = "", ...settings }) {
  const now = Date.now();
  return { id: newId(), title: "New chat", system, settings, created: now, updated: now, first: null, messages: [] };
}

export function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

// Where a conversation says what is searched for: null, or the words around it ("" when the title does).
export function searchIn(conversation, query) {
  const wanted = query.toLowerCase();
  if (conversation.title.toLowerCase().includes(wanted)) return "";
  for (const { content, attachments = [] } of [...pathOf(conversation), ...conversation.messages]) {
    for (const text of [content, ...attachments.map((one) => `${one.name} ${one.text}`)]) {
      const at = text.toLowerCase().indexOf(wanted);
      if (at >= 0) return `${at > 24 ? "…" : ""}${text.slice(Math.max(0, at - 24), at + wanted.length + 60).replace(/\s+/g, " ")}`;
    }
  }
  return null;
}

// Conversations of a file we exported. One that is here already comes in beside it, under an id of its own.
export function readExport(text) {
  const found = JSON.parse(text)?.conversations;
  if (!Array.isArray(found) || !found.every(isConversation)) throw new Error("this is no export of Millrace's chat");
  return found.map(upgrade).map((one) => (loadConversation(one.id) ? { ...one, id: newId() } : one));
}

export const writeExport = (conversations) => JSON.stringify({ application: "millrace", conversations }, null, 2);
