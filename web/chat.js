// The chat page: which conversation is shown, what is being written, and what the reader may do next.
import { ApiError, getJson, setApiKey } from "./api.js";
import { byId, drawIcons, el } from "./dom.js";
import { AssistantView, UserView } from "./message_view.js";
import { bindSettings } from "./settings.js";
import { Sidebar, toast } from "./sidebar.js";
import { isConversationKey, loadConversation, loadSettings, newConversation, saveConversation, titleOf } from "./store.js";
import { newAnswer, requestBody, writeAnswer } from "./turn.js";

const kOpen = "millrace.open"; // the conversation that a reload shows again
const kSuggestions = [
  "Explain how a water mill works, step by step.",
  "Write a Python function that reverses the words of a sentence.",
  "Make a table of the planets with their diameters.",
];

const prompt = byId("prompt");
const scroller = byId("scroll");
const turns = new Map(); // conversation id -> { conversation, message, controller } of the answer being written
const views = new Map(); // message -> view, of the conversation that is shown
const timers = new Map(); // conversation id -> when it will be saved
const deleted = new Set(); // conversation ids that an answer must not bring back
let conversation = newConversation(loadSettings().system ?? "");
let retry = null; // what to do again once the reader has entered a key

// ---- Saving ----

function save(one) {
  try {
    saveConversation(one);
  } catch {
    toast("The browser's storage is full: export and delete some conversations.");
  }
}

// An answer that is being written is saved every second, so that a reload loses little.
function saveSoon(one) {
  if (!timers.has(one.id)) timers.set(one.id, setTimeout(flush, 1000, one));
}

function flush(one) {
  clearTimeout(timers.get(one.id));
  timers.delete(one.id);
  if (one.messages.length && !deleted.has(one.id)) save(one);
}

// ---- What is shown ----

function resultOf(callId) {
  return conversation.messages.find((message) => message.role === "tool" && message.toolCallId === callId)?.content;
}

function viewOf(message, index) {
  if (message.role === "user") return new UserView(message, { resend: (text) => resend(index, text) });
  return new AssistantView(message, { regenerate: () => regenerate(index), answerCalls, resultOf });
}

function showConversation() {
  views.clear();
  const live = turns.get(conversation.id)?.message;
  conversation.messages.forEach((message, index) => {
    if (message.role === "tool") return; // shown with the call
    const view = viewOf(message, index);
    view.update(message === live);
    views.set(message, view);
  });
  byId("messages").replaceChildren(...[...views.values()].map((view) => view.node));
  byId("welcome").hidden = conversation.messages.length > 0;
  document.title = conversation.messages.length ? `${conversation.title} – Millrace` : "Millrace";
  localStorage.setItem(kOpen, conversation.id);
  showTurn();
  sidebar.show();
}

function showTurn() {
  const busy = turns.has(conversation.id);
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
}

function atBottom() {
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 48;
}

function showWayDown() {
  byId("to-bottom").hidden = atBottom();
}

function toBottom() {
  scroller.scrollTop = scroller.scrollHeight;
  showWayDown();
}

// Draws at most once a frame, and follows the text only for a reader who is at its end.
function drawer(message) {
  let pending = false;
  return () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => {
      pending = false;
      const follow = atBottom();
      views.get(message)?.update([...turns.values()].some((turn) => turn.message === message));
      if (follow) toBottom();
      else showWayDown();
    });
  };
}

function say(text) {
  byId("status").textContent = text;
}

// ---- Turns ----

async function answer() {
  const one = conversation;
  const message = newAnswer();
  const body = requestBody(one, byId("model").value, loadSettings());
  const controller = new AbortController();
  one.messages.push(message);
  turns.set(one.id, { conversation: one, message, controller });
  one.updated = Date.now();
  flush(one);
  showConversation();
  toBottom();
  say("The answer is being written.");
  const draw = drawer(message);
  try {
    await writeAnswer(body, message, controller.signal, () => {
      saveSoon(one);
      draw();
    });
  } catch (error) {
    message.error = error.message;
    if (!(error instanceof ApiError)) console.error(error);
    if (error.status === 401) askForKey(() => regenerateLast(one));
  }
  if (turns.get(one.id)?.message !== message) return; // the reader has sent something else meanwhile
  turns.delete(one.id);
  one.updated = Date.now();
  flush(one);
  draw();
  showTurn();
  sidebar.show();
  say(message.error ?? (message.finish === "stopped" ? "Stopped." : "The answer is complete."));
}

function ask(text) {
  if (turns.has(conversation.id)) return;
  if (!conversation.messages.length) conversation.title = titleOf(text);
  conversation.messages.push({ role: "user", content: text });
  answer();
}

// Stops what is being written in `one`, and waits for nobody: its turn ends by itself, writing to a message that is
// no longer part of the conversation.
function stop(one = conversation) {
  turns.get(one.id)?.controller.abort();
}

function cutAt(index) {
  stop();
  turns.delete(conversation.id);
  conversation.messages.length = index;
}

function resend(index, text) {
  cutAt(index);
  ask(text);
  prompt.focus();
}

function regenerate(index) {
  cutAt(index);
  answer();
}

function regenerateLast(one) {
  if (conversation.id !== one.id || !conversation.messages.length) return;
  regenerate(conversation.messages.length - 1);
}

function answerCalls(results) {
  for (const [toolCallId, content] of results) conversation.messages.push({ role: "tool", toolCallId, content });
  answer();
}

// ---- The page's other parts ----

function open(id) {
  deleted.delete(id);
  conversation = turns.get(id)?.conversation ?? loadConversation(id) ?? conversation;
  showConversation();
  toBottom();
}

function start() {
  conversation = newConversation(loadSettings().system ?? "");
  showConversation();
  prompt.focus();
}

const sidebar = new Sidebar({
  current: () => conversation.id,
  open,
  start,
  gone(id) {
    deleted.add(id);
    turns.get(id)?.controller.abort();
    if (id === conversation.id) start();
  },
});

function askForKey(then) {
  retry = then;
  byId("key-form").hidden = false;
  byId("key-entry").focus();
}

async function loadModels() {
  const select = byId("model");
  try {
    const { data } = await getJson("/v1/models");
    select.replaceChildren(...data.map(({ id }) => el("option", { value: id }, id)));
    select.disabled = data.length < 2;
  } catch (error) {
    select.replaceChildren(el("option", { value: "" }, error.status === 401 ? "Key needed" : "No server"));
    if (error.status === 401) askForKey(loadModels);
    else setTimeout(loadModels, 3000);
  }
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, innerHeight * 0.4)}px`;
}

function send() {
  const text = prompt.value.trim();
  if (!text || turns.has(conversation.id)) return;
  prompt.value = "";
  grow();
  ask(text);
}

function bind() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt.addEventListener("input", grow);
  prompt.addEventListener("keydown", (event) => {
    const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
    if (!sends) return;
    event.preventDefault();
    send();
  });
  byId("stop").addEventListener("click", () => {
    stop();
    prompt.focus();
  });
  addEventListener("keydown", (event) => event.key === "Escape" && !document.querySelector("dialog[open]") && stop());
  byId("to-bottom").addEventListener("click", toBottom);
  scroller.addEventListener("scroll", showWayDown);
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setApiKey(byId("key-entry").value.trim());
    byId("key-entry").value = "";
    byId("key-form").hidden = true;
    loadModels();
    if (retry !== loadModels) retry?.();
  });
  bindSettings({
    systemNow: () => conversation.system,
    onSave(settings) {
      conversation.system = settings.system;
      flush(conversation);
      loadModels();
    },
  });
  byId("suggestions").append(
    ...kSuggestions.map((text) => el("button", { type: "button", class: "outlined", onclick: () => ask(text) }, text)));
  addEventListener("storage", (event) => isConversationKey(event.key) && sidebar.show()); // another tab
  addEventListener("pagehide", () => [...turns.values()].forEach((turn) => flush(turn.conversation)));
}

drawIcons();
bind();
conversation = loadConversation(localStorage.getItem(kOpen)) ?? conversation;
showConversation();
toBottom();
loadModels();
