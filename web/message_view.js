// One message on the page. The views show what the message says and are told when it grows; they decide nothing.
import { codeBlock, GrowingMarkdown } from "./markdown.js";
import { number } from "./chart.js";
import { copyButton, el, icon, iconButton } from "./dom.js";

const seconds = (s) => (s < 10 ? `${s.toFixed(2)} s` : `${s.toFixed(1)} s`);

// "41.3 tokens/s · first token after 0.21 s · 128 tokens · 96 of 120 prompt tokens from the cache"
export function speedLine(stats) {
  if (!stats) return "";
  const parts = [];
  if (stats.rate > 0) parts.push(`${stats.exact ? "" : "≈ "}${number(stats.rate, stats.rate < 100 ? 1 : 0)} tokens/s`);
  if (stats.first > 0) parts.push(`first token ${seconds(stats.first)}`);
  if (stats.tokens > 0 && stats.exact) parts.push(`${number(stats.tokens)} tokens`);
  if (stats.cached > 0) parts.push(`${number(stats.cached)} of ${number(stats.prompt)} prompt tokens cached`);
  return parts.join(" · ");
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still streaming, or not JSON: as it is
  }
}

export class UserView {
  constructor(message, { resend }) {
    this.message = message;
    this.resend = resend;
    this.node = el("article", { class: "user", "aria-label": "You" });
    this.show();
  }

  show() {
    this.edit = iconButton("edit", "Edit and send again", () => this.showEditor());
    this.node.replaceChildren(
      el("div", { class: "bubble" }, this.message.content),
      el("div", { class: "actions" }, copyButton(() => this.message.content), this.edit),
    );
  }

  showEditor() {
    const area = el("textarea", { "aria-label": "Edit your message", rows: 2 });
    area.value = this.message.content;
    const leave = () => {
      this.show();
      this.edit.focus();
    };
    const send = () => area.value.trim() && this.resend(area.value.trim());
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.node.replaceChildren(
      el("div", { class: "editor" }, area,
        el("div", { class: "row" }, el("small", {}, "What follows is written anew."),
          el("button", { type: "button", class: "quiet", onclick: leave }, "Cancel"),
          el("button", { type: "button", class: "filled", onclick: send }, "Send"))),
    );
    area.focus();
  }

  update() {}
}

export class AssistantView {
  constructor(message, { regenerate, answerCalls, resultOf }) {
    this.message = message;
    this.answerCalls = answerCalls;
    this.resultOf = resultOf; // of a tool call's id, or undefined
    this.thought = el("summary");
    this.reasoningText = el("div", { class: "prose" });
    this.reasoning = el("details", { class: "reasoning" }, this.thought, this.reasoningText);
    this.growingReasoning = new GrowingMarkdown(this.reasoningText);
    this.text = el("div", { class: "prose" });
    this.growing = new GrowingMarkdown(this.text);
    this.calls = el("div", { class: "calls" });
    this.note = el("p", { class: "problem", hidden: true });
    this.speed = el("span", { class: "speed" });
    this.actions = el("div", { class: "actions" },
      copyButton(() => this.message.content, "Copy the answer"), iconButton("again", "Answer again", regenerate), this.speed);
    this.node = el("article", { class: "assistant", "aria-label": "Assistant" },
      this.reasoning, this.text, this.calls, this.note, this.actions);
  }

  // live: the answer is being written.
  update(live) {
    const { content, reasoning, stats, error, finish } = this.message;
    this.node.setAttribute("aria-busy", live);
    this.node.classList.toggle("live", live);
    this.node.classList.toggle("silent", live && !content && !reasoning && !this.message.toolCalls.length);
    this.reasoning.hidden = !reasoning;
    const thinking = live && !content && !this.message.toolCalls.length;
    this.thought.textContent = thinking ? "Thinking…" : stats?.thinking ? `Thought for ${seconds(stats.thinking)}` : "Thoughts";
    this.growingReasoning.update(reasoning);
    this.growing.update(content);
    this.showCalls(live);
    const notes = { length: "The answer reached its limit of tokens.", stopped: "Stopped." };
    this.note.textContent = error ?? notes[finish] ?? "";
    this.note.hidden = !this.note.textContent;
    this.note.classList.toggle("mild", !error);
    this.speed.textContent = speedLine(stats);
    const [copy, again] = this.actions.children;
    copy.hidden = live || !content;
    again.hidden = live;
  }

  showCalls(live) {
    const { toolCalls } = this.message;
    const state = JSON.stringify([toolCalls, live]);
    if (state === this.callsShown) return; // do not lose what is being typed
    this.callsShown = state;
    const open = !live && toolCalls.some((call) => this.resultOf(call.id) === undefined);
    const fields = new Map();
    const cards = toolCalls.map((call) => {
      const result = this.resultOf(call.id);
      const card = el("section", { class: "call", "aria-label": `Call of ${call.name}` },
        el("h3", {}, icon("tool"), call.name || "…"), codeBlock(pretty(call.arguments), "arguments"));
      if (result !== undefined) card.append(codeBlock(pretty(result), "result"));
      else if (open) {
        const field = el("textarea", { rows: 2, class: "code", spellcheck: "false" });
        fields.set(call.id, field);
        card.append(el("label", { class: "field" }, "Result", field));
      }
      return card;
    });
    this.calls.replaceChildren(...cards);
    if (!open) return;
    const send = () => this.answerCalls([...fields].map(([id, field]) => [id, field.value]));
    const label = fields.size > 1 ? "Send the results" : "Send the result";
    this.calls.append(el("button", { type: "button", class: "outlined", onclick: send }, label));
  }
}
