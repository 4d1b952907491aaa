// The chat page: which conversation is shown, what is being written, and what the reader may do next.
import { ApiError, setApiKey } from "./api.js";
import { add, choose, drop, parentOf, pathOf, siblingsOf } from "./branches.js";
import { Composer } from "./composer.js";
import { byId, copyText, drawIcons, el, toast } from "./dom.js";
import { conversationMarkdown, messageMarkdown } from "./markdown_export.js";
import { AssistantView, UserView } from "./message_view.js";
import { ModelPicker } from "./models.js";
import { bindSettings } from "./settings.js";
import { bindShortcuts } from "./shortcuts.js";
import { Sidebar } from "./sidebar.js";
import { isConversationKey, loadConversation, loadSettings, newConversation, saveConversation, titleOf } from "./store.js";
import { ToolLoop } from "./tool_loop.js";
import { toolDefinitions } from "./tools.js";
import { bindTools } from "./tools_dialog.js";
import { scriptUrl } from "./trusted.js";
import { apiMessages, continueAnswer, newAnswer, requestBody, writeAnswer } from "./turn.js";

const kOpen = "millrace.open"; // the conversation that a reload shows again
const kSuggestions = [
  "Explain how a water mill works, step by step.",
  "Write a Python function that reverses the words of a sentence.",
  "Make a table of the planets with their diameters.",
];

const scroller = byId("scroll");
const turns = new Map(); // conversation id -> { conversation, message, controller, done } of the answer being written
const views = new Map(); // message -> view, of the conversation that is shown
const loading = new Set(); // answers whose model has to be loaded before they begin
const timers = new Map(); // conversation id -> when it will be saved
const deleted = new Set(); // conversation ids that an answer must not bring back
let conversation = newConversation(loadSettings());
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

const page = {
  resend,
  async regenerate(message) {
    const one = conversation;
    await halt();
    answer(one, parentOf(one, message));
  },
  goOn,
  isLoading: (message) => loading.has(message),
  siblings: (message) => siblingsOf(conversation, message),
  async choose(message) {
    await halt();
    choose(conversation, message);
    flush(conversation);
    showConversation();
    views.get(message)?.node.scrollIntoView({ block: "nearest" });
  },
  tools: {
    stateOf: (message, call) => loop.stateOf(message, call),
    allow: (message, call, always) => loop.allow(conversation, message, call, always),
    refuse: (message, call) => loop.refuse(conversation, message, call),
    answer: (message, results) => loop.answer(conversation, message, results),
  },
};

function showConversation() {
  views.clear();
  const live = turns.get(conversation.id)?.message;
  const path = pathOf(conversation);
  path.forEach((message) => {
    const view = message.role === "user" ? new UserView(message, page) : new AssistantView(message, page);
    view.update(message === live, message === path.at(-1));
    views.set(message, view);
  });
  byId("messages").replaceChildren(...[...views.values()].map((view) => view.node));
  byId("welcome").hidden = path.length > 0;
  byId("copy-chat").disabled = !path.length;
  byId("chat-title").hidden = !path.length;
  showTitle();
  localStorage.setItem(kOpen, conversation.id);
  showTurn();
  sidebar.show();
}

function showTitle() {
  byId("chat-title").textContent = conversation.title;
  document.title = conversation.messages.length ? `${conversation.title} – Millrace` : "Millrace";
}

// An answer is being written here, or its tools are at work.
function isBusy(one = conversation) {
  return turns.has(one.id) || loop.isBusy(pathOf(one).at(-1));
}

function showTurn() {
  byId("send").hidden = isBusy();
  byId("stop").hidden = !isBusy();
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
      views.get(message)?.update([...turns.values()].some((turn) => turn.message === message), pathOf(conversation).at(-1) === message);
      if (follow) toBottom();
      else showWayDown();
    });
  };
}

// For screen readers: what has come to be, not each piece of it.
function say(text) {
  byId("status").textContent = text;
}

// ---- Turns ----

// Runs `write` to fill `message`, shows it growing, keeps it. True when nothing went wrong and nobody stopped it.
async function write(one, message, writeInto) {
  const controller = new AbortController();
  let finish;
  const done = new Promise((resolve) => (finish = resolve));
  turns.set(one.id, { conversation: one, message, controller, done });
  one.updated = Date.now();
  flush(one);
  if (one === conversation) {
    showConversation();
    toBottom();
    say("The answer is being written.");
  }
  const draw = drawer(message);
  try {
    await writeInto(controller.signal, () => {
      saveSoon(one);
      draw();
    });
  } catch (error) {
    message.error = error.message;
    if (!(error instanceof ApiError)) console.error(error);
    if (error.status === 401) askForKey(() => one === conversation && !isBusy() && page.regenerate(message));
  }
  turns.delete(one.id);
  if (loading.delete(message)) models.load(); // it says now that it is loaded, or why not
  finish();
  one.updated = Date.now();
  flush(one);
  draw();
  showTurn();
  sidebar.show();
  if (one === conversation) say(message.error ?? (message.finish === "stopped" ? "Stopped." : `The answer: ${message.content.slice(0, 2000)}`));
  return !message.error && message.finish !== "stopped";
}

// An answer below `parent`, in a branch of its own when there is one already. rounds: see ToolLoop.
async function answer(one, parent, rounds = 0) {
  if (turns.has(one.id)) return;
  const path = pathOf(one);
  const body = requestBody(path.slice(0, path.indexOf(parent) + 1), one, models.value, toolDefinitions());
  const failed = siblingsOf(one, { parent: parent?.id ?? null, role: "assistant" }).filter((message) => message.error && !message.content);
  failed.forEach((message) => drop(one, message)); // an answer that never came is no branch
  one.model = models.value;
  const message = add(one, newAnswer(), parent);
  if (models.isAsleep) loading.add(message);
  const whole = await write(one, message, (signal, changed) => writeAnswer(body, message, signal, changed));
  if (!whole || !message.toolCalls.length) return;
  message.toolCalls.forEach((call, i) => (call.id ||= `call_${message.id}_${i}`));
  roundsOf.set(message, rounds);
  loop.begin(one, message, rounds);
}

const roundsOf = new WeakMap(); // answer -> how many came before it since the reader spoke

const loop = new ToolLoop({
  changed(one, message) {
    saveSoon(one);
    if (one !== conversation) return;
    drawer(message)();
    showTurn();
  },
  goOn: (one, message) => answer(one, message, (roundsOf.get(message) ?? 0) + 1),
});

function goOn(message) {
  if (isBusy()) return;
  const path = pathOf(conversation);
  const body = requestBody(path.slice(0, path.indexOf(message)), conversation, models.value, toolDefinitions());
  write(conversation, message, (signal, changed) => continueAnswer(body, message, signal, changed));
}

function ask(text, attachments = []) {
  if (isBusy()) return;
  const path = pathOf(conversation);
  if (!path.length && !conversation.named) conversation.title = titleOf(text || attachments[0].name);
  const message = { role: "user", content: text, ...(attachments.length && { attachments }) };
  answer(conversation, add(conversation, message, path.at(-1)));
}

// The same place in the conversation, said differently: a branch.
async function resend(message, text) {
  const one = conversation;
  await halt();
  const { attachments } = message;
  answer(one, add(one, { role: "user", content: text, ...(attachments && { attachments }) }, parentOf(one, message)));
  composer.prompt.focus();
}

function stop() {
  turns.get(conversation.id)?.controller.abort();
  loop.stop(pathOf(conversation).at(-1));
}

// Stops what is under way here, and waits until it has come to rest.
async function halt() {
  const turn = turns.get(conversation.id);
  stop();
  await turn?.done;
}

// ---- The page's other parts ----

function open(id) {
  deleted.delete(id);
  conversation = turns.get(id)?.conversation ?? (id === conversation.id ? conversation : loadConversation(id)) ?? conversation;
  models.follow(conversation.model);
  showConversation();
  toBottom();
}

function start() {
  conversation = newConversation(loadSettings());
  models.follow("");
  showConversation();
  composer.prompt.focus();
}

const models = new ModelPicker({
  needsKey: askForKey,
  onChoose(id) {
    conversation.model = id;
    flush(conversation);
  },
});

const composer = new Composer({
  send: ask,
  busy: isBusy,
  requestFor: (message) => ({ model: models.value, messages: apiMessages([...pathOf(conversation), message], conversation.system) }),
});

const sidebar = new Sidebar({
  current: () => conversation.id,
  open,
  start,
  gone(id) {
    deleted.add(id);
    turns.get(id)?.controller.abort();
    if (id === conversation.id) start();
  },
  renamed(id, title) {
    const one = id === conversation.id ? conversation : turns.get(id)?.conversation ?? loadConversation(id);
    Object.assign(one, { title, named: true });
    save(one);
    if (one === conversation) showTitle();
  },
});

function askForKey(then) {
  retry = then;
  byId("key-form").hidden = false;
  byId("key-entry").focus();
}

async function copy(text, said) {
  await copyText(text).then(() => toast(said), () => toast("The browser did not let us copy."));
}

function copyLast() {
  const last = pathOf(conversation).findLast((message) => message.role === "assistant");
  if (last) copy(messageMarkdown(last), "The answer is copied.");
}

function bind() {
  byId("stop").addEventListener("click", () => {
    stop();
    composer.prompt.focus();
  });
  byId("to-bottom").addEventListener("click", toBottom);
  scroller.addEventListener("scroll", showWayDown);
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setApiKey(byId("key-entry").value.trim());
    byId("key-entry").value = "";
    byId("key-form").hidden = true;
    const again = retry;
    retry = null;
    models.load().then(() => models.models.length && again?.());
  });
  byId("copy-chat").addEventListener("click", () => copy(conversationMarkdown(conversation, pathOf(conversation)), "The chat is copied as Markdown."));
  bindSettings({
    current: () => ({ ...conversation.settings, system: conversation.system }),
    onSave({ system = "", ...settings }) {
      Object.assign(conversation, { system, settings });
      flush(conversation);
      models.load();
    },
  });
  bindTools();
  bindShortcuts({ search: () => sidebar.focusSearch(), start, above: () => sidebar.step(-1), below: () => sidebar.step(1), copy: copyLast,
    write: () => composer.prompt.focus(), stop });
  byId("suggestions").append(
    ...kSuggestions.map((text) => el("button", { type: "button", class: "outlined", onclick: () => ask(text) }, text)));
  addEventListener("storage", (event) => isConversationKey(event.key) && sidebar.show()); // another tab
  addEventListener("pagehide", () => [...turns.values()].forEach((turn) => flush(turn.conversation)));
}

drawIcons();
bind();
conversation = loadConversation(localStorage.getItem(kOpen)) ?? conversation;
models.follow(conversation.model);
showConversation();
toBottom();
models.load();
navigator.serviceWorker?.register(scriptUrl("sw.js")).catch(() => {}); // browsers refuse it where it does not matter
