// Colours for code: a text is cut into pieces of a few kinds (comment, string, number, keyword, ...). A language is an
// ordered list of patterns, each tried where the last piece ended; what none matches is plain. This is for the eye: no
// grammar is checked, and code that is cut off in the middle of a string has colours too. Time is linear in the text:
// no pattern tries anything twice, and the few that look back do so over the spaces before a word.
import { kLanguages } from "./highlight_languages.js";

const kLongest = 200000; // characters; more are shown without colours

const names = new Map();
for (const [name, language] of Object.entries(kLanguages)) {
  for (const alias of [name, ...(language.aliases ?? [])]) names.set(alias, language);
}

export const isKnown = (name) => names.has(name.toLowerCase());

// One pattern of all of a language's rules, each a named group, sticky so that it matches where we are.
function compile(language) {
  language.pattern ??= new RegExp(language.rules.map(([kind, { source }], i) => `(?<${kind}${i}>${source})`).join("|"),
    `my${language.ignoreCase ? "i" : ""}`);
  return language.pattern;
}

function kindOf(language, match) {
  const [group, text] = Object.entries(match.groups).find(([, value]) => value !== undefined);
  const kind = group.replace(/\d+$/, "");
  if (kind !== "word") return kind;
  const word = language.ignoreCase ? text.toLowerCase() : text;
  if (language.keywords?.has(word)) return "keyword";
  if (language.constants?.has(word)) return "constant";
  if (language.types?.has(word)) return "type";
  return "";
}

// [[kind, text]...]; kind is "" for plain text. Joined, the texts are the text.
export function pieces(text, name) {
  const language = names.get(name.toLowerCase());
  if (!language || text.length > kLongest) return [["", text]];
  const pattern = compile(language);
  const list = [];
  const add = (kind, piece) => {
    if (list.at(-1)?.[0] === kind) list.at(-1)[1] += piece;
    else list.push([kind, piece]);
  };
  for (let at = 0; at < text.length; ) {
    pattern.lastIndex = at;
    const match = pattern.exec(text);
    const found = match?.[0] ? match : null;
    add(found ? kindOf(language, found) : "", found ? found[0] : text[at]);
    at += found ? found[0].length : 1;
  }
  return list;
}

// The same as nodes: plain text, and spans with a class of their kind.
export function highlighted(text, name) {
  return pieces(text, name).map(([kind, piece]) => {
    if (!kind) return piece;
    const span = document.createElement("span");
    span.className = `tok-${kind}`;
    span.textContent = piece;
    return span;
  });
}
