// Markdown inside a line, to nodes: code, bold, italic, strike-through, links and formulas. Nodes are made by name and
// text is set as text, so HTML in an answer is shown, never obeyed; a link leads to http or https or is no link. Time is
// linear in the text, however it was made: searches that fail are remembered, others are bounded.
import { el } from "./dom.js";
import { mathElement } from "./math.js";

export const kDeepest = 12; // of nested lists, quotes and emphasis; deeper is shown as it was written
const kLongest = 2000; // of a link's label and address, and of a formula between words, in characters
const kTries = 32; // at a closing mark

const kMarks = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const kSpecial = /[\\`*_~[!h<$]/g; // where something may begin; h for http
const kFormulas = [ // opening, closing, whether it stands on a line of its own
  ["$$", "$$", true],
  ["\\[", "\\]", true],
  ["\\(", "\\)", false],
  ["$", "$", false],
];
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
  formula(at) {
    const [open, close, display] = kFormulas.find(([mark]) => this.text.startsWith(mark, at)) ?? [];
    if (!open) return 0;
    const from = at + open.length;
    const to = open === "$" ? this.dollar(from) : this.find(close, from);
    if (to < 0 || to - from > kLongest || !this.text.slice(from, to).trim()) return 0;
    const element = mathElement(this.text.slice(from, to), display);
    if (!element) return 0;
    this.push(element);
    return to + close.length;
  }

  // Where a formula that began before `from` ends, or -1. $5 and $6 are prices: a formula begins and ends with something
  // else than a space, and no digit follows it.
  dollar(from) {
    if (isSpace(this.text[from]) || isWord(this.text[from - 2])) return -1;
    for (let at = this.find("$", from), tries = 0; at >= 0 && tries < kTries; tries++) {
      const before = this.text[at - 1];
      if (at > from && before !== "\\" && !isSpace(before)) return /[0-9]/.test(this.text[at + 1] ?? "") ? -1 : at;
      at = this.find("$", at + 1);
    }
    return -1;
  }

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
      if (first === "\\") after = this.formula(next) || this.escape(next);
      else if (first === "$") after = this.formula(next);
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

export function inline(text, depth = 0) {
  return depth > kDeepest ? [text] : new Inline(text, depth).parse();
}
