// What the keyboard does on the whole page, and the dialog that says so.
import { bindDialog, byId, el } from "./dom.js";

const kMac = /Mac|iPhone|iPad/.test(navigator.platform);
const kCommand = kMac ? "⌘" : "Ctrl";
const isTyping = ({ target }) => target.closest("input, textarea, select, [contenteditable]") !== null;

// [keys as they are shown, what they do, matches(event), the action's name]
const kShortcuts = [
  [[kCommand, "K"], "Search in your chats", (e) => (e.ctrlKey || e.metaKey) && !e.shiftKey && e.key.toLowerCase() === "k", "search"],
  [[kCommand, "Shift", "O"], "Begin a new chat", (e) => (e.ctrlKey || e.metaKey) && e.shiftKey && e.key.toLowerCase() === "o", "start"],
  [["Alt", "↑"], "The chat above in the list", (e) => e.altKey && e.key === "ArrowUp", "above"],
  [["Alt", "↓"], "The chat below in the list", (e) => e.altKey && e.key === "ArrowDown", "below"],
  [[kCommand, "Shift", ";"], "Copy the last answer", (e) => (e.ctrlKey || e.metaKey) && e.shiftKey && (e.key === ";" || e.key === ":"), "copy"],
  [["/"], "Go to the message box", (e) => e.key === "/" && !isTyping(e), "write"],
  [["?"], "Show this help", (e) => e.key === "?" && !isTyping(e), "help"],
  [["Esc"], "Stop the answer", (e) => e.key === "Escape", "stop"],
];
const kInBox = [[["Enter"], "Send the message"], [["Shift", "Enter"], "Begin a new line"]];

function row([keys, meaning]) {
  return el("div", {}, el("dt", {}, keys.map((key, i) => [i ? " " : null, el("kbd", {}, key)]).flat()), el("dd", {}, meaning));
}

// actions: a function for each name above, besides help.
export function bindShortcuts(actions) {
  const dialog = bindDialog(byId("help"));
  byId("shortcuts").append(...[...kInBox, ...kShortcuts].map(row));
  const all = { ...actions, help: () => dialog.showModal() };
  byId("open-help").addEventListener("click", all.help);
  addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]")) return;
    const found = kShortcuts.find(([, , matches]) => matches(event));
    if (!found) return;
    event.preventDefault();
    all[found[3]]();
  });
}
