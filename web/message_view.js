// One message on the page. The views show what the message says and are told when it grows; they decide nothing.
// `page` is what the reader may ask for, and what the views cannot know: { resend, regenerate, goOn, choose, siblings,
// isLoading, tools }.
import { GrowingMarkdown } from "./markdown.js";
import { number } from "./chart.js";
import { copyButton, el, icon, iconButton } from "./dom.js";
import { messageMarkdown } from "./markdown_export.js";
import { pictureView } from "./pictures.js";
import { ToolCallsView } from "./tool_view.js";

const seconds = (s) => (s < 10 ? `${s.toFixed(2)} s` : `${s.toFixed(1)} s`);

// "41.3 tokens/s · first token 0.21 s · 128 tokens · 96 of 120 prompt tokens cached"
export function speedLine(stats) {
  if (!stats) return "";
  const parts = [];
  if (stats.rate > 0) parts.push(`${stats.exact ? "" : "≈ "}${number(stats.rate, stats.rate < 100 ? 1 : 0)} tokens/s`);
  if (stats.first > 0) parts.push(`first token ${seconds(stats.first)}`);
  if (stats.tokens > 0 && stats.exact) parts.push(`${number(stats.tokens)} tokens`);
  if (stats.cached > 0) parts.push(`${number(stats.cached)} of ${number(stats.prompt)} prompt tokens cached`);
  return parts.join(" · ");
}

// ◂ 2/3 ▸, or nothing where there is no other branch.
function branchesOf(message, { siblings, choose }) {
  const all = siblings(message);
  if (all.length < 2) return null;
  const at = all.indexOf(message);
  const step = (name, label, to) => {
    const button = iconButton(name, label, () => choose(all[to]));
    button.disabled = to < 0 || to >= all.length;
    return button;
  };
  return el("span", { class: "branches", role: "group", "aria-label": "Versions" }, step("left", "Previous version", at - 1),
    el("span", {}, `${at + 1}/${all.length}`), step("right", "Next version", at + 1));
}

// A file that went along, with its text for whoever wants to see it.
export function fileChip({ name, text, pages, image }, extra = null) {
  const size = image ? "picture" : pages ? `${number(pages)} ${pages === 1 ? "page" : "pages"}` : `${number(text.length)} characters`;
  return el("span", { class: "chip" }, icon("file"), el("span", { class: "chip-name" }, name), el("small", {}, size), extra);
}

export class UserView {
  constructor(message, page) {
    this.message = message;
    this.page = page;
    this.node = el("article", { class: "user", "aria-label": "You" });
    this.show();
  }

  show() {
    const { content, attachments = [] } = this.message;
    this.edit = iconButton("edit", "Edit and send again", () => this.showEditor());
    const files = attachments.map((file) => file.image ? pictureView(file) :
      el("details", { class: "file" }, el("summary", {}, fileChip(file)), el("pre", { tabindex: 0, role: "region", "aria-label": file.name }, file.text)));
    this.node.replaceChildren(
      ...(files.length ? [el("div", { class: "files" }, files)] : []),
      ...(content ? [el("div", { class: "bubble" }, content)] : []),
      el("div", { class: "actions" }, branchesOf(this.message, this.page), copyButton(() => messageMarkdown(this.message), "Copy as Markdown"), this.edit),
    );
  }

  showEditor() {
    const area = el("textarea", { "aria-label": "Edit your message", rows: 2 });
    area.value = this.message.content;
    const leave = () => {
      this.show();
      this.edit.focus();
    };
    const send = () => area.value.trim() && this.page.resend(this.message, area.value.trim());
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.node.replaceChildren(
      el("div", { class: "editor" }, area,
        el("div", { class: "row" }, el("small", {}, "Begins a branch; what is here now stays."),
          el("button", { type: "button", class: "quiet", onclick: leave }, "Cancel"),
          el("button", { type: "button", class: "filled", onclick: send }, "Send"))),
    );
    area.focus();
  }

  update() {}
}

const kNotes = { length: "The answer reached its limit of tokens.", stopped: "Stopped." };

export class AssistantView {
  constructor(message, page) {
    this.message = message;
    this.page = page;
    this.thought = el("summary");
    this.reasoningText = el("div", { class: "prose" });
    this.reasoning = el("details", { class: "reasoning" }, this.thought, this.reasoningText);
    this.growingReasoning = new GrowingMarkdown(this.reasoningText);
    this.text = el("div", { class: "prose" });
    this.growing = new GrowingMarkdown(this.text);
    this.calls = new ToolCallsView(message, page.tools);
    this.note = el("p", { class: "problem", hidden: true });
    this.speed = el("span", { class: "speed" });
    this.copy = copyButton(() => messageMarkdown(this.message), "Copy as Markdown");
    this.again = iconButton("again", "Answer again", () => page.regenerate(message));
    this.onward = iconButton("onward", "Continue the answer", () => page.goOn(message));
    this.branches = el("span");
    this.actions = el("div", { class: "actions" }, this.branches, this.copy, this.again, this.onward, this.speed);
    this.node = el("article", { class: "assistant", "aria-label": "Assistant" },
      this.reasoning, this.text, this.calls.node, this.note, this.actions);
  }

  // live: the answer is being written; last: nothing follows it.
  update(live, last = true) {
    const { content, reasoning, toolCalls, stats, error, finish } = this.message;
    this.node.setAttribute("aria-busy", live);
    this.node.classList.toggle("live", live);
    const silent = live && !content && !reasoning && !toolCalls.length;
    this.node.classList.toggle("silent", silent);
    this.reasoning.hidden = !reasoning;
    const thinking = live && !content && !toolCalls.length;
    this.thought.textContent = thinking ? "Thinking…" : stats?.thinking ? `Thought for ${seconds(stats.thinking)}` : "Thoughts";
    this.growingReasoning.update(reasoning);
    this.growing.update(content);
    this.calls.update(live);
    this.note.textContent = error ?? kNotes[finish] ?? (silent && this.page.isLoading(this.message) ? "The model is being loaded…" : "");
    this.note.hidden = !this.note.textContent;
    this.note.classList.toggle("mild", !error);
    this.speed.textContent = speedLine(stats);
    const branches = live ? null : branchesOf(this.message, this.page);
    this.branches.replaceChildren(...(branches ? [branches] : []));
    this.copy.hidden = live || !content;
    this.again.hidden = live;
    this.onward.hidden = live || !last || !content || toolCalls.length > 0;
  }
}
