// The tool calls of an answer: each with its arguments and, when there is one, its result, folded away once it is done.
// What may happen to a call is the page's business: `tools` is { stateOf, allow, refuse, answer }, and a call's state is
//   asking    the reader has to allow it: once, from now on, or not
//   running   the tool server is at work
//   by hand   no tool server knows it: the reader writes the result
//   done      it has a result
import { el, icon } from "./dom.js";
import { codeBlock } from "./markdown.js";

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still streaming, or not JSON: as it is
  }
}

const isJson = (text) => pretty(text) !== text || /^[[{]/.test(text);
const kStates = { asking: "asks for permission", running: "running…", "by hand": "wants a result", done: "done", failed: "failed", writing: "…" };
const button = (kind, label, onclick) => el("button", { type: "button", class: kind, onclick }, label);

export class ToolCallsView {
  constructor(message, tools) {
    this.message = message;
    this.tools = tools;
    this.node = el("div", { class: "calls" });
    this.shown = "";
    this.open = new Map(); // call id -> whether the reader folded it open
  }

  update(live) {
    const { toolCalls } = this.message;
    const states = toolCalls.map((call) => (live ? "writing" : this.tools.stateOf(this.message, call)));
    const state = JSON.stringify([toolCalls, states]);
    if (state === this.shown) return; // do not lose what is being typed
    this.shown = state;
    this.fields = new Map();
    this.node.replaceChildren(...toolCalls.map((call, i) => this.card(call, states[i])));
    if (!this.fields.size) return;
    const send = () => this.tools.answer(this.message, [...this.fields].map(([call, field]) => [call, field.value]));
    this.node.append(button("outlined", this.fields.size > 1 ? "Send the results" : "Send the result", send));
  }

  card(call, state) {
    const said = state === "done" && call.result?.isError ? "failed" : state;
    const summary = el("summary", {}, icon("tool"), el("span", { class: "call-name" }, call.name || "…"),
      el("span", { class: `call-state ${said.replace(" ", "-")}` }, kStates[said]));
    const args = call.arguments.trim();
    const card = el("details", { class: "call", "aria-label": `Call of ${call.name}` }, summary,
      args && args !== "{}" ? codeBlock(pretty(args), "arguments") : el("p", { class: "mild" }, "Without arguments."));
    card.open = this.open.get(call.id) ?? (state === "asking" || state === "by hand");
    card.addEventListener("toggle", () => this.open.set(call.id, card.open));
    if (call.result) card.append(this.result(call.result));
    if (state === "asking") card.append(this.question(call));
    if (state === "by hand") card.append(this.field(call));
    return card;
  }

  result({ content, isError }) {
    const block = codeBlock(pretty(content), isError ? "error" : isJson(content) ? "result" : "text");
    if (isError) block.classList.add("failed");
    return block;
  }

  question(call) {
    return el("div", { class: "question" },
      button("filled", "Allow once", () => this.tools.allow(this.message, call, false)),
      button("outlined", "Always allow", () => this.tools.allow(this.message, call, true)),
      button("quiet", "Refuse", () => this.tools.refuse(this.message, call)));
  }

  field(call) {
    const field = el("textarea", { rows: 2, class: "code", spellcheck: "false" });
    this.fields.set(call, field);
    return el("label", { class: "field" }, "Result", field);
  }
}
