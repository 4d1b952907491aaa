// Markdown as models write it, to elements: headings, paragraphs, lists, quotes, tables, fenced code, and inside a
// line code, bold, italic, strike-through and links. Nodes are made by name and text is set as text, so HTML in an
// answer is shown, never obeyed; a link leads to http or https or is no link. Time is linear in the text, however it
// was made: searches that fail are remembered, others are bounded, and no pattern can go back over what it has read.
import { copyButton, el } from "./dom.js";

const kDeepest = 12; // of nested lists, quotes and emphasis; deeper is shown as it was written
const kLongest = 2000; // of a link's label and address, in characters
const kTries = 32; // at a closing mark

// ---- Inside a line ----

const kMarks = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const kSpecial = /[\\`*_~[!h<]/g; // where something may begin; h for http
const kUrl = /https?:\/\/[^\s<>"'`]{1,2000}/iy;
const kPunctuation = /[!-/:-@[-`{-~]/;
const isWord = (c) => c !== undefined && /[\p{L}\p{N}_]/u.test(c);
const isSpace = (c) => c === undefined || /\s/.test(c);

function link(url, label) {
  return el("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, label);
}

// How many backticks come before each position.
function countTicks(text) {
  const before = new Uint32Array(text.length + 1);
  for (let i = 0; i < text.length; i++) before[i + 1] = before[i] + (text[i] === "`");
  return before;
}

class Inline {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.absent = new Set(); // closers that were looked for up to the end, in vain
    this.ticks = countTicks(text);
    this.nodes = [];
    this.plain = "";
  }

  // The position of `closer` at or after `from`, or -1.
  find(closer, from) {
    if (this.absent.has(closer)) return -1;
    const at = this.text.indexOf(closer, from);
    if (at < 0) this.absent.add(closer);
    return at;
  }

  push(node) {
    if (this.plain) this.nodes.push(this.plain);
    this.plain = "";
    this.nodes.push(node);
  }

  inner(from, to) {
    return inline(this.text.slice(from, to), this.depth + 1);
  }

  // Each of these returns where to go on, or 0 when nothing of its kind begins at `at`.
  escape(at) {
    const next = this.text[at + 1];
    if (next === "\n") this.push(el("br"));
    else if (next !== undefined && kPunctuation.test(next)) this.plain += next;
    else return 0;
    return at + 2;
  }

  code(at) {
    let end = at;
    while (this.text[end] === "`") end++;
    const fence = this.text.slice(at, end);
    let close = this.find(fence, end);
    while (close >= 0 && this.text[close + fence.length] === "`") {
      let after = close + fence.length;
      while (this.text[after] === "`") after++;
      close = this.find(fence, after);
    }
    if (close < 0) {
      this.plain += fence;
      return end;
    }
    let body = this.text.slice(end, close).replaceAll("\n", " ");
    if (/^ .*[^ ].* $/.test(body)) body = body.slice(1, -1);
    this.push(el("code", {}, body));
    return close + fence.length;
  }

  emphasis(at) {
    for (const [mark, tag] of kMarks) {
      if (!this.text.startsWith(mark, at)) continue;
      const from = at + mark.length;
      if (isSpace(this.text[from]) || (mark[0] === "_" && isWord(this.text[at - 1]))) continue;
      const close = this.closer(mark, from);
      if (close < 0) continue;
      this.push(el(tag, {}, this.inner(from, close)));
      return close + mark.length;
    }
    return 0;
  }

  // Where `mark` ends what began before `from`: not after a space, not half of a longer mark, not inside code.
  closer(mark, from) {
    for (let at = this.find(mark, from), tries = 0; at >= 0 && tries < kTries; tries++) {
      const after = this.text[at + mark.length];
      const longer = mark.length === 1 && (after === mark || this.text[at - 1] === mark);
      const inWord = mark[0] === "_" && isWord(after);
      const inCode = (this.ticks[at] - this.ticks[from]) % 2 === 1;
      if (at > from && !isSpace(this.text[at - 1]) && !longer && !inWord && !inCode) return at;
      at = this.find(mark, at + (longer && after === mark ? 2 : 1));
    }
    return -1;
  }

  bracket(at) {
    const image = this.text[at] === "!";
    const open = at + (image ? 1 : 0);
    if (this.text[open] !== "[") return 0;
    const middle = this.find("](", open);
    if (middle < 0 || middle - open > kLongest) return 0;
    let end = middle + 2;
    for (let parens = 1; end - middle < kLongest && !isSpace(this.text[end]); end++) {
      if (this.text[end] === "(") parens++;
      if (this.text[end] === ")" && --parens === 0) break;
    }
    const url = this.text.slice(middle + 2, end);
    if (isSpace(this.text[end])) end = this.find(")", end); // a title follows
    if (end < 0 || !/^https?:\/\/\S+$/i.test(url)) return 0;
    const label = this.inner(open + 1, middle);
    this.push(link(url, label.length ? label : url));
    return end + 1;
  }

  url(at) {
    const start = this.text[at] === "<" ? at + 1 : at;
    if (start === at && isWord(this.text[at - 1])) return 0;
    kUrl.lastIndex = start;
    const found = kUrl.exec(this.text)?.[0];
    if (!found) return 0;
    if (start > at) {
      if (this.text[start + found.length] !== ">") return 0;
      this.push(link(found, found));
      return start + found.length + 1;
    }
    let url = found.replace(/[.,:;!?*_~\]]+$/, "");
    if (url.endsWith(")") && !url.includes("(")) url = url.slice(0, -1);
    this.push(link(url, url));
    return at + url.length;
  }

  parse() {
    for (let at = 0; at < this.text.length; ) {
      kSpecial.lastIndex = at;
      const next = kSpecial.exec(this.text)?.index ?? this.text.length;
      this.plain += this.text.slice(at, next);
      if (next >= this.text.length) break;
      const first = this.text[next];
      let after = 0;
      if (first === "\\") after = this.escape(next);
      else if (first === "`") after = this.code(next);
      else if (first === "h" || first === "<") after = this.url(next);
      else if (first === "[" || first === "!") after = this.bracket(next);
      else after = this.emphasis(next);
      if (!after) {
        this.plain += first;
        after = next + 1;
      }
      at = after;
    }
    if (this.plain) this.nodes.push(this.plain);
    return this.nodes;
  }
}

function inline(text, depth = 0) {
  return depth > kDeepest ? [text] : new Inline(text, depth).parse();
}

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

// Cuts lines into [first, last) of each top-level block.
function* cut(lines) {
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const first = at;
    const fence = kFence.exec(lines[at]);
    if (fence) {
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
      for (at++; at < lines.length && lines[at].trim() && !beginsBlock(lines, at); ) at++;
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
  return el("figure", { class: "code" }, bar, el("pre", { tabindex: 0 }, el("code", {}, text)));
}

function fenced(lines) {
  const [, ticks, ticksInfo, tildes, tildesInfo] = kFence.exec(lines[0]);
  const closed = lines.length > 1 && closesFence(lines.at(-1), ticks ?? tildes);
  return codeBlock(lines.slice(1, closed ? -1 : undefined).join("\n"), (ticksInfo ?? tildesInfo).trim().split(" ")[0]);
}

function block(lines, depth) {
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
