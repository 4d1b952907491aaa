// TeX formulas to MathML, which browsers draw without fonts or scripts of ours. A formula becomes a tree of
// [tag, attributes, children] first (what tests compare), then elements. Nothing a formula says is an error: commands
// nobody knows are shown as they were written, and what is not closed ends where the formula does.
import {
  inAlphabet, kAccents, kBigSizes, kExtensible, kFonts, kFunctions, kIntegrals, kLetters, kLimits, kOperators, kSpaces, kStretchyAccents,
  kSums, kTextFonts, kUnderAccents,
} from "./math_symbols.js";
import { kDelimiters, kEnvironments } from "./math_tables.js";

const kLongest = 20000; // characters of a formula
const kDeepest = 60; // groups and arguments within each other
const kMathML = "http://www.w3.org/1998/Math/MathML";

const node = (tag, attributes, ...children) => [tag, attributes, children];
const row = (nodes) => (nodes.length === 1 ? nodes[0] : node("mrow", {}, ...nodes));
const mo = (text, attributes = {}) => node("mo", attributes, text);
const fence = (text) => mo(text, { fence: "true", stretchy: "true" });
const space = (em) => node("mspace", { width: `${em}em` });
const kColour = /^(#[0-9a-f]{3,8}|[a-z]{3,20})$/i;
const kToken = /\\[a-zA-Z]+\*?|\\[^]|[^]/y;
const kStops = new Set(["}", "&", "\\\\", "\\cr", "\\end", "\\right", "\\middle"]);

class Parser {
  constructor(source, display) {
    this.source = source;
    this.at = 0;
    this.depth = 0;
    this.display = display;
    this.font = "";
  }

  // ---- Reading ----

  skipSpace() {
    for (;;) {
      while (/\s/.test(this.source[this.at] ?? "")) this.at++;
      if (this.source[this.at] !== "%") return;
      const end = this.source.indexOf("\n", this.at);
      this.at = end < 0 ? this.source.length : end; // a comment
    }
  }

  // The next token, "" at the end: a command with its backslash, or a character.
  peek() {
    this.skipSpace();
    kToken.lastIndex = this.at;
    let token = kToken.exec(this.source)?.[0] ?? "";
    if (token.endsWith("*") && token.length > 2 && token !== "\\operatorname*") token = token.slice(0, -1);
    if (token.length === 1 && token >= "\ud800" && token <= "\udbff") token = this.source.slice(this.at, this.at + 2);
    return token;
  }

  next() {
    const token = this.peek();
    this.at += token.length;
    return token;
  }

  take(token) {
    if (this.peek() !== token) return false;
    this.at += token.length;
    return true;
  }

  // The text between braces as it is, or of the next character.
  raw() {
    if (!this.take("{")) return this.next();
    const from = this.at;
    for (let open = 1; this.at < this.source.length; this.at++) {
      const c = this.source[this.at];
      if (c === "\\") this.at++;
      else if (c === "{") open++;
      else if (c === "}" && --open === 0) return this.source.slice(from, this.at++);
    }
    return this.source.slice(from);
  }

  // [text] or null
  option() {
    if (!this.take("[")) return null;
    const end = this.source.indexOf("]", this.at);
    const text = this.source.slice(this.at, end < 0 ? undefined : end);
    this.at += text.length + (end < 0 ? 0 : 1);
    return text;
  }

  // What `read` reads, with other state than around it.
  within(state, read) {
    const before = {};
    for (const name of Object.keys(state)) before[name] = this[name];
    Object.assign(this, state);
    const result = read();
    Object.assign(this, before);
    return result;
  }

  // ---- Rows and atoms ----

  // Nodes up to a token that ends a row (which is not taken) or up to `closer`.
  nodes(closer = "") {
    const list = [];
    const { font, display } = this; // \rm and \displaystyle hold to the end of the group
    for (let token = this.peek(); token && token !== closer && !kStops.has(token); token = this.peek()) {
      const infix = { "\\over": {}, "\\choose": { linethickness: "0" }, "\\atop": { linethickness: "0" } }[token];
      if (infix) {
        this.next();
        const fraction = node("mfrac", infix, row(list.splice(0)), row(this.nodes(closer)));
        list.push(...(token === "\\choose" ? [fence("("), fraction, fence(")")] : [fraction]));
        break;
      }
      const atom = this.scripted();
      if (atom) list.push(atom);
    }
    Object.assign(this, { font, display });
    return list;
  }

  group() {
    const list = this.nodes("}");
    this.take("}");
    return row(list);
  }

  // The argument of a command: a group or one atom.
  argument(state = {}) {
    return this.within({ ...state, depth: this.depth + 1 }, () => {
      if (this.depth > kDeepest) return node("mtext", {}, this.raw());
      if (this.take("{")) return this.group();
      const token = this.peek();
      if (!token || kStops.has(token)) return node("mrow", {});
      if (/\d/.test(token)) return node("mn", {}, this.styled(this.next()));
      return this.atom() ?? node("mrow", {});
    });
  }

  // An atom with what is written below and above it.
  scripted() {
    const begin = this.peek();
    let base = begin === "^" || begin === "_" || begin === "'" ? node("mrow", {}) : this.atom();
    let limits = base?.limits ?? false;
    let below = null;
    const above = [];
    for (let token = this.peek(); token; token = this.peek()) {
      if (token === "\\limits" || token === "\\nolimits") limits = this.next() === "\\limits";
      else if (token === "'") {
        let primes = "";
        while (this.take("'")) primes += "′";
        above.push(mo(primes));
      } else if (token === "^") {
        this.next();
        above.push(this.argument({ display: false }));
      } else if (token === "_" && !below) {
        this.next();
        below = this.argument({ display: false });
      } else break;
    }
    if (!below && !above.length) return base;
    base ??= node("mrow", {});
    const tag = limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (!above.length) return node(tag[0], {}, base, below);
    return below ? node(tag[2], {}, base, below, row(above)) : node(tag[1], {}, base, row(above));
  }

  styled(text) {
    return inAlphabet(text, this.font);
  }

  letter(c) {
    if (this.font === "normal") return node("mi", { mathvariant: "normal" }, c);
    return node("mi", {}, this.styled(c));
  }

  // One thing, without scripts. null: it draws nothing.
  atom() {
    const token = this.next();
    if (token === "{") return this.within({ depth: this.depth + 1 }, () => (this.depth > kDeepest ? node("mtext", {}, "{") : this.group()));
    if (token[0] === "\\" && token.length > 1) return this.command(token.slice(1));
    if (/[0-9]/.test(token)) return this.number(token);
    if (/\p{L}/u.test(token)) return this.font && this.font !== "default" && /[a-zA-Z]/.test(token) ? this.word(token) : this.letter(token);
    if (token === "~") return node("mtext", {}, "\u00a0");
    if (token === "-") return mo("−");
    if (token === "*") return mo("∗");
    if ("()[]|/".includes(token)) return mo(token === "|" ? "∣" : token, { stretchy: "false" });
    return mo(token);
  }

  number(first) {
    kNumber.lastIndex = this.at;
    const rest = kNumber.exec(this.source)?.[0] ?? "";
    this.at += rest.length;
    return node("mn", {}, this.styled(first + rest));
  }

  // \mathrm{max} is one name, not three letters.
  word(first) {
    kWord.lastIndex = this.at;
    const rest = kWord.exec(this.source)?.[0] ?? "";
    this.at += rest.length;
    const text = this.styled(first + rest);
    return node("mi", this.font === "normal" ? { mathvariant: "normal" } : {}, text);
  }

  // ---- Commands ----

  command(name) {
    if (kLetters.has(name)) return this.symbol(name);
    if (kOperators.has(name)) return mo(kOperators.get(name), "lr|".includes(name[0]) || "vert" === name ? { stretchy: "false" } : {});
    if (kSums.has(name)) return this.large(mo(kSums.get(name)), this.display);
    if (kIntegrals.has(name)) return mo(kIntegrals.get(name));
    if (kFunctions.has(name)) return node("mi", {}, name);
    if (kLimits.has(name)) return this.large(node("mi", {}, kLimits.get(name)), this.display);
    if (kSpaces.has(name)) return space(kSpaces.get(name));
    if (kFonts.has(name)) return this.fontCommand(name);
    if (kTextFonts.has(name)) return this.text(name);
    if (kBigSizes.has(name)) return this.sized(kBigSizes.get(name));
    if (kAccents.has(name)) return node("mover", { accent: "true" }, this.argument(), mo(kAccents.get(name), { stretchy: "false" }));
    if (kStretchyAccents.has(name)) {
      const accented = node("mover", { accent: "true" }, this.argument(), mo(kStretchyAccents.get(name), { stretchy: "true" }));
      return name.startsWith("overb") || name === "overgroup" ? this.large(accented, true) : accented;
    }
    if (kUnderAccents.has(name)) {
      const accented = node("munder", { accentunder: "true" }, this.argument(), mo(kUnderAccents.get(name), { stretchy: "true" }));
      return name.startsWith("underb") || name === "undergroup" ? this.large(accented, true) : accented;
    }
    if (kExtensible.has(name)) return this.extensible(kExtensible.get(name));
    if (kDelimiters.has(`\\${name}`)) return mo(kDelimiters.get(`\\${name}`), { stretchy: "false" });
    const rule = Object.hasOwn(kRules, name) ? kRules[name] : null;
    return rule ? rule(this, name) : node("mtext", { class: "unknown" }, `\\${name}`);
  }

  symbol(name) {
    const c = kLetters.get(name);
    const upright = /^[Α-Ω]$/.test(c) || !/\p{L}/u.test(c); // capital Greek letters stand upright
    if (/[⋯…⋮⋱]/.test(c)) return mo(c);
    return this.font && this.font !== "normal" ? node("mi", {}, this.styled(c)) : node("mi", upright ? { mathvariant: "normal" } : {}, c);
  }

  large(base, limits) {
    base.limits = limits;
    return base;
  }

  fontCommand(name) {
    const font = kFonts.get(name);
    if (name.length > 2 && name !== "bold") return this.argument({ font });
    this.font = font; // \bf and its kin hold up to the end of the group
    return null;
  }

  // Words, and formulas among them.
  text(name) {
    const parts = this.raw().split(/(?<!\\)\$/);
    const font = kTextFonts.get(name);
    const nodes = parts.map((part, i) => {
      if (i % 2) return this.within({ source: part, at: 0, display: false, font: "" }, () => row(this.nodes()));
      const plain = part.replace(/\\([%$#&_{} ])/g, "$1").replace(/^\s+|\s+$/g, "\u00a0");
      return plain && node("mtext", {}, inAlphabet(plain, font));
    });
    return row(nodes.filter(Boolean));
  }

  delimiter() {
    const token = this.next();
    return kDelimiters.get(token) ?? (token === "." ? "" : token);
  }

  sized(em) {
    const size = `${em}em`;
    return mo(this.delimiter(), { minsize: size, maxsize: size, stretchy: "true" });
  }

  // \left( a \middle| b \right)
  fenced() {
    const open = this.delimiter();
    const list = [];
    for (;;) {
      list.push(...this.within({ depth: this.depth + 1 }, () => (this.depth > kDeepest ? [] : this.nodes())));
      if (!this.take("\\middle")) break;
      list.push(fence(this.delimiter()));
    }
    const close = this.take("\\right") ? this.delimiter() : "";
    return node("mrow", {}, ...(open ? [fence(open)] : []), ...list, ...(close ? [fence(close)] : []));
  }

  extensible(arrow) {
    const below = this.option();
    const above = this.argument({ display: false });
    const under = below === null ? null : this.within({ source: below, at: 0, display: false }, () => row(this.nodes()));
    const stem = mo(arrow, { stretchy: "true" });
    const padded = node("mpadded", { width: "+0.6em", lspace: "0.3em" }, above);
    return under ? node("munderover", {}, stem, under, padded) : node("mover", {}, stem, padded);
  }

  environment() {
    const name = this.raw();
    const kind = kEnvironments.get(name.replace(/\*$/, ""));
    if (!kind || this.depth > kDeepest) return node("mtext", { class: "unknown" }, `\\begin{${name}}`);
    const columns = kind.columns === "given" ? this.raw() : kind.columns;
    if (kind.skips) this.raw();
    const display = kind.display && this.display;
    const rows = this.within({ display, depth: this.depth + 1 }, () => this.rows());
    if (this.take("\\end")) this.raw();
    const sides = [...(columns === "given" ? "" : columns)].filter((c) => "lcr".includes(c));
    const side = (i) => ({ l: "left", r: "right" })[kind.repeats ? sides[i % sides.length] : sides[i]];
    const table = node("mtable", { class: kind.class, displaystyle: display ? "true" : null }, ...rows.map((cells) =>
      node("mtr", {}, ...cells.map((cell, i) => node("mtd", { class: side(i) }, ...cell)))));
    const [open, close] = kind.fences;
    return open || close ? node("mrow", {}, ...(open ? [fence(open)] : []), table, ...(close ? [fence(close)] : [])) : table;
  }

  // Rows of cells up to what ends a table.
  rows() {
    const rows = [[]];
    for (;;) {
      while (this.take("\\hline")) continue;
      rows.at(-1).push(this.nodes());
      if (this.take("&")) continue;
      if (!this.take("\\\\") && !this.take("\\cr")) break;
      if (this.source[this.at] === "[") this.option(); // extra space
      rows.push([]);
    }
    const last = rows.at(-1);
    if (rows.length > 1 && last.length === 1 && !last[0].length) rows.pop(); // a line break after the last row
    return rows;
  }
}

const kNumber = /[0-9]*(?:[.][0-9]+|[.](?![0-9.]))?/y;
const kWord = /[a-zA-Z]+/y;

const fraction = (parser, display, attributes = {}) =>
  node("mfrac", attributes, parser.argument({ display }), parser.argument({ display }));
const binomial = (parser) => node("mrow", {}, fence("("), fraction(parser, false, { linethickness: "0" }), fence(")"));
const inStyle = (parser, display, inner) => node("mstyle", { displaystyle: String(display), scriptlevel: "0" }, inner);
const switchStyle = (display) => (parser) => {
  parser.display = display;
  return inStyle(parser, display, row(parser.nodes("}")));
};
const boxed = (name) => (parser) => node("mrow", { class: name }, parser.argument());
const swallow = (parser) => (parser.raw(), null);
const nothing = () => null;
const over = (parser) => {
  const above = parser.argument({ display: false });
  return parser.large(node("mover", {}, parser.argument(), above), true);
};
const length = (text) => {
  const [, value, unit] = /^\s*(-?[\d.]+)\s*(em|ex|mu|pt|cm|mm|in)/.exec(text) ?? [];
  return Number(value ?? 0) * { em: 1, ex: 0.43, mu: 1 / 18, pt: 0.1, cm: 2.85, mm: 0.285, in: 7.2 }[unit ?? "em"];
};
const modulus = (opened) => (parser) => {
  const inner = [node("mi", {}, "mod"), space(0.3333), parser.argument()];
  return opened ? node("mrow", {}, space(0.4444), mo("(", { stretchy: "false" }), ...inner, mo(")", { stretchy: "false" })) : row([space(0.4444), ...inner]);
};

// Commands that read arguments of their own.
const kRules = {
  frac: (parser) => fraction(parser, false),
  cfrac: (parser) => inStyle(parser, true, fraction(parser, true)),
  dfrac: (parser) => inStyle(parser, true, fraction(parser, false)),
  tfrac: (parser) => inStyle(parser, false, fraction(parser, false)),
  binom: binomial,
  dbinom: (parser) => inStyle(parser, true, binomial(parser)),
  tbinom: (parser) => inStyle(parser, false, binomial(parser)),
  sqrt(parser) {
    const index = parser.option();
    if (index === null) return node("msqrt", {}, parser.argument());
    const degree = parser.within({ source: index, at: 0, display: false }, () => row(parser.nodes()));
    return node("mroot", {}, parser.argument(), degree);
  },
  left: (parser) => parser.fenced(),
  begin: (parser) => parser.environment(),
  displaystyle: switchStyle(true),
  textstyle: switchStyle(false),
  scriptstyle: nothing,
  scriptscriptstyle: nothing,
  operatorname: (parser) => node("mi", {}, parser.raw().replace(/\\[,;: ]/g, " ").replace(/\\[a-z]+\s*|[{}]/g, "")),
  "operatorname*": (parser) => parser.large(kRules.operatorname(parser), parser.display),
  mathop: (parser) => parser.large(parser.argument(), parser.display),
  mathbin: (parser) => parser.argument(),
  mathrel: (parser) => parser.argument(),
  mathord: (parser) => parser.argument(),
  mathopen: (parser) => parser.argument(),
  mathclose: (parser) => parser.argument(),
  mathpunct: (parser) => parser.argument(),
  mathinner: (parser) => parser.argument(),
  overset: over,
  stackrel: over,
  underset(parser) {
    const below = parser.argument({ display: false });
    return parser.large(node("munder", {}, parser.argument(), below), true);
  },
  not(parser) {
    const negated = parser.atom();
    const text = negated?.[2]?.[0];
    return typeof text === "string" ? node(negated[0], negated[1], `${text}\u0338`.normalize()) : negated;
  },
  bmod: () => node("mi", {}, "mod"),
  mod: modulus(false),
  pmod: modulus(true),
  pod: (parser) => node("mrow", {}, space(0.4444), mo("(", { stretchy: "false" }), parser.argument(), mo(")", { stretchy: "false" })),
  substack(parser) {
    parser.take("{");
    const rows = parser.rows();
    parser.take("}");
    return node("mtable", { class: "stacked" }, ...rows.map((cells) => node("mtr", {}, ...cells.map((cell) => node("mtd", {}, ...cell)))));
  },
  phantom: (parser) => node("mphantom", {}, parser.argument()),
  hphantom: (parser) => node("mphantom", { class: "flat" }, parser.argument()),
  vphantom: (parser) => node("mpadded", { width: "0" }, node("mphantom", {}, parser.argument())),
  smash: (parser) => (parser.option(), parser.argument()),
  boxed: boxed("boxed"),
  fbox: (parser) => node("mrow", { class: "boxed" }, parser.text("text")),
  cancel: boxed("cancel"),
  bcancel: boxed("cancel"),
  xcancel: boxed("cancel"),
  hspace: (parser) => space(length(parser.raw())),
  mspace: (parser) => space(length(parser.raw())),
  tag: (parser) => row([space(2), node("mtext", {}, `(${parser.raw()})`)]),
  label: swallow,
  ref: (parser) => node("mtext", {}, parser.raw()),
  nonumber: nothing,
  notag: nothing,
  allowbreak: nothing,
  hline: nothing,
  right: nothing, // without its \left
  textcolor: (parser) => coloured(parser.raw(), parser.argument()),
  color: (parser) => coloured(parser.raw(), row(parser.nodes("}"))),
  colon: () => mo(":"),
  cr: nothing,
  " ": () => node("mtext", {}, "\u00a0"),
  "\n": () => node("mtext", {}, "\u00a0"),
  "(": nothing,
  ")": nothing,
  "[": nothing,
  "]": nothing,
};
for (const c of "%$#&_") kRules[c] = () => node("mi", { mathvariant: "normal" }, c);

function coloured(colour, inner) {
  return kColour.test(colour.trim()) ? node("mstyle", { mathcolor: colour.trim() }, inner) : inner;
}

// ---- Trees and elements ----

export function parseTex(source, display = false) {
  const parser = new Parser(source, display);
  const list = [];
  while (parser.at < source.length) {
    list.push(...parser.nodes());
    const stray = parser.next(); // what ends a row ends nothing here
    if (stray === "\\\\") list.push(node("mspace", { linebreak: "newline" }));
    else if (stray) list.push(node("mtext", { class: "unknown" }, stray));
  }
  return node("math", { display: display ? "block" : null }, row(list));
}

function toElement([tag, attributes, children]) {
  const element = document.createElementNS(kMathML, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== "") element.setAttribute(name, value);
  }
  element.append(...children.map((child) => (typeof child === "string" ? child : toElement(child))));
  return element;
}

// Null when there is no drawing it: it is too long or too deep.
export function mathElement(source, display) {
  if (source.length > kLongest) return null;
  try {
    const element = toElement(parseTex(source, display));
    element.setAttribute("alttext", source.trim());
    return element;
  } catch (error) {
    if (error instanceof RangeError) return null; // the browser's stack has an end
    throw error;
  }
}
