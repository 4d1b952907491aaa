// Markdown as models write it, to elements: headings, paragraphs, lists, quotes, tables, fenced code and formulas. What is
// inside a line is markdown_inline.js's business. Time is linear in the text here too: no pattern can go back over what
// it has read.
import { copyButton, el } from "./dom.js";
import { highlighted } from "./highlight.js";
import { inline, kDeepest } from "./markdown_inline.js";
import { mathElement } from "./math.js";

// ---- Lines to blocks ----

const kFence = /^ {0,3}(?:(`{3,})([^`]*)|(~{3,})(.*))$/;
const kHeading = /^ {0,3}(#{1,6})\s(.*)$/;
const kRule = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const kItem = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)(.*)$/;
const kQuote = /^ {0,3}>\s?/;
const isTableRule = (line) => line.includes("|") && line.includes("-") && cells(line).every((cell) => /^:?-+:?$/.test(cell));
const isTable = (lines, at) => lines[at].includes("|") && at + 1 < lines.length && isTableRule(lines[at + 1]);
const beginsBlock = (lines, at) =>
  kFence.test(lines[at]) || kHeading.test(lines[at]) || kRule.test(lines[at]) || kQuote.test(lines[at]) ||
  kItem.test(lines[at]) || isTable(lines, at);

const kFormula = /^ {0,3}(\$\$|\\\[|\\begin\{(?:equation|align|gather|multline|eqnarray|displaymath|alignat|flalign)\*?\})/;
const kLongestFormula = 100; // lines
const kFormulaEnds = { "$$": "$$", "\\[": "\\]" };

// Where the formula that begins at `at` ends, after its last line; 0 when it does not, or when text follows it there.
function endOfFormula(lines, at, absent) {
  const open = kFormula.exec(lines[at])?.[1];
  if (!open) return 0;
  const close = kFormulaEnds[open] ?? open.replace("begin", "end");
  if (absent.has(close)) return 0;
  const from = lines[at].indexOf(open) + open.length;
  for (let i = at; i < Math.min(lines.length, at + kLongestFormula); i++) {
    const found = lines[i].indexOf(close, i === at ? from : 0);
    if (found >= 0) return /^[\s.,;:]*$/.test(lines[i].slice(found + close.length)) ? i + 1 : 0;
  }
  if (at + kLongestFormula >= lines.length) absent.add(close);
  return 0;
}

// Cuts lines into [first, last) of each top-level block.
function* cut(lines) {
  const absent = new Set(); // ends of formulas that do not come any more
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const first = at;
    const fence = kFence.exec(lines[at]);
    const afterFormula = endOfFormula(lines, at, absent);
    if (afterFormula) at = afterFormula;
    else if (fence) {
      for (at++; at < lines.length && !closesFence(lines[at], fence[1] ?? fence[3]); ) at++;
      at++;
    } else if (kHeading.test(lines[at]) || kRule.test(lines[at])) {
      at++;
    } else if (kQuote.test(lines[at])) {
      while (at < lines.length && kQuote.test(lines[at])) at++;
    } else if (kItem.test(lines[at])) {
      at = endOfList(lines, at);
    } else if (isTable(lines, at)) {
      for (at += 2; at < lines.length && lines[at].includes("|"); ) at++;
    } else {
      for (at++; at < lines.length && lines[at].trim() && !beginsBlock(lines, at) && !endOfFormula(lines, at, absent); ) at++;
    }
    yield [first, Math.min(at, lines.length)];
  }
}

const closesFence = (line, fence) => line.trim().startsWith(fence) && !line.trim().slice(fence.length).replaceAll(fence[0], "");
const indentOf = (line) => line.length - line.trimStart().length;
const isOrdered = (item) => /\d/.test(item[2]);

// A list goes on over items of its kind, what is indented under them, and blank lines between.
function endOfList(lines, at) {
  const first = kItem.exec(lines[at]);
  const inside = first[1].length + 1;
  for (at++; at < lines.length; at++) {
    const line = lines[at];
    if (!line.trim()) {
      let next = at;
      while (next < lines.length && !lines[next].trim()) next++;
      const item = next < lines.length && kItem.exec(lines[next]);
      const goesOn = next < lines.length && (indentOf(lines[next]) > inside || (item && isOrdered(item) === isOrdered(first)));
      if (!goesOn) return at;
      at = next - 1;
      continue;
    }
    if (indentOf(line) > first[1].length) continue;
    const item = kItem.exec(line);
    if (item ? isOrdered(item) !== isOrdered(first) || kRule.test(line) : beginsBlock(lines, at)) return at;
  }
  return at;
}

function list(lines, depth) {
  const first = kItem.exec(lines[0]);
  const base = first[1].length;
  const items = [];
  for (const line of lines) {
    const item = kItem.exec(line);
    if (item && item[1].length <= base) items.push([item[4]]);
    else items.at(-1).push(line);
  }
  const start = isOrdered(first) ? parseInt(first[2], 10) : 1;
  const nodes = items.map((item) => {
    const rest = item.slice(1);
    const indent = rest.reduce((least, line) => (line.trim() ? Math.min(least, indentOf(line)) : least), 8);
    const body = [item[0]].concat(rest.map((line) => line.slice(Math.min(indent, indentOf(line)))));
    return el("li", {}, tight(blocks(body, depth + 1)));
  });
  return el(isOrdered(first) ? "ol" : "ul", { start: start === 1 ? null : start }, nodes);
}

// An item of one paragraph needs no paragraph.
function tight(nodes) {
  const only = nodes.filter((node) => node.tagName === "P").length === 1 && nodes[0].tagName === "P";
  return only ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function cells(line) {
  const trimmed = line.trim();
  const inner = trimmed.slice(trimmed.startsWith("|") ? 1 : 0, /(^|[^\\])\|$/.test(trimmed.slice(-2)) ? -1 : undefined);
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines, depth) {
  const sides = cells(lines[1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "middle" : "right") : null));
  const row = (tag, line) => {
    const texts = cells(line);
    return el("tr", {}, sides.map((side, i) => el(tag, { class: side }, inline(texts[i] ?? "", depth))));
  };
  const head = el("thead", {}, row("th", lines[0]));
  const body = el("tbody", {}, lines.slice(2).map((line) => row("td", line)));
  return el("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, el("table", {}, head, body));
}

export function codeBlock(text, language) {
  const bar = el("div", { class: "bar" }, el("span", {}, language || "text"), copyButton(() => text, "Copy the code"));
  const label = language ? `Code, ${language}` : "Code";
  return el("figure", { class: "code" }, bar, el("pre", { tabindex: 0, role: "region", "aria-label": label }, el("code", {}, highlighted(text, language))));
}

function fenced(lines) {
  const [, ticks, ticksInfo, tildes, tildesInfo] = kFence.exec(lines[0]);
  const closed = lines.length > 1 && closesFence(lines.at(-1), ticks ?? tildes);
  return codeBlock(lines.slice(1, closed ? -1 : undefined).join("\n"), (ticksInfo ?? tildesInfo).trim().split(" ")[0]);
}

function formula(lines) {
  const text = lines.join("\n").trim();
  const open = kFormula.exec(lines[0])[1];
  const close = kFormulaEnds[open];
  const end = close ? text.lastIndexOf(close) : text.length;
  const element = mathElement(text.slice(close ? open.length : 0, end), true);
  if (!element) return el("p", {}, text);
  return el("div", { class: "formula", tabindex: 0, role: "region", "aria-label": "Formula" }, element, close ? text.slice(end + close.length).trim() : "");
}

function block(lines, depth) {
  if (endOfFormula(lines, 0, new Set()) === lines.length) return formula(lines);
  const heading = kHeading.exec(lines[0]);
  if (kFence.test(lines[0])) return fenced(lines);
  if (heading) return el(`h${Math.min(heading[1].length + 2, 6)}`, {}, inline(heading[2].trim(), depth)); // the page has h1, h2
  if (kRule.test(lines[0])) return el("hr");
  if (depth < kDeepest && kQuote.test(lines[0])) {
    return el("blockquote", {}, blocks(lines.map((line) => line.replace(kQuote, "")), depth + 1));
  }
  if (depth < kDeepest && kItem.test(lines[0])) return list(lines, depth);
  if (lines.length > 1 && isTable(lines, 0)) return table(lines, depth);
  const text = lines.map((line) => (line.endsWith("  ") ? line.trim() + "\\" : line.trimStart())).join("\n");
  return el("p", {}, inline(text, depth));
}

function blocks(lines, depth) {
  return [...cut(lines)].map(([from, to]) => block(lines.slice(from, to), depth));
}

const linesOf = (text) => text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n");

export function markdown(text) {
  return blocks(linesOf(text), 0);
}

// Text that grows: only the blocks that changed are made again, so a long answer streams as smoothly as a short one,
// and what the reader has selected above stays selected.
export class GrowingMarkdown {
  constructor(root) {
    this.root = root;
    this.sources = [];
  }

  update(text) {
    const lines = linesOf(text);
    const sources = [...cut(lines)].map(([from, to]) => lines.slice(from, to).join("\n"));
    let same = 0;
    while (same < sources.length && sources[same] === this.sources[same]) same++;
    while (this.root.children.length > same) this.root.lastChild.remove();
    for (const source of sources.slice(same)) this.root.append(block(source.split("\n"), 0));
    this.sources = sources;
  }
}
