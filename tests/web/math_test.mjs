// Holds the page's formulas against KaTeX's: each line of formulas.txt, as a display and in a line, must become the same
// MathML up to what browsers draw the same. The fonts are looked at apart, since KaTeX names them and we write Unicode's
// own letters; so are formulas that are broken.
//   node math_test.mjs PATH/TO/node_modules
import assert from "node:assert";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { parseTex } from "../../web/math.js";

const katex = createRequire(`${process.argv[2]}/`)("katex");

// ---- KaTeX's text to trees: [tag, attributes, children] ----

const kEntities = { lt: "<", gt: ">", amp: "&", quot: '"' };
const unescape = (text) => text.replace(/&(#x?)?(\w+);/g, (_, mark, name) =>
  mark ? String.fromCodePoint(parseInt(name, mark === "#x" ? 16 : 10)) : kEntities[name]);

function readXml(text) {
  const stack = [["root", {}, []]];
  for (const [, close, tag, attributes, empty, content] of text.matchAll(/<(\/?)([\w-]+)([^>]*?)(\/?)>|([^<]+)/g)) {
    if (content !== undefined) stack.at(-1)[2].push(unescape(content));
    else if (close) stack.at(-2)[2].push(stack.pop());
    else {
      const node = [tag, Object.fromEntries([...attributes.matchAll(/([\w-]+)="([^"]*)"/g)].map(([, name, value]) => [name, value])), []];
      if (empty) stack.at(-1)[2].push(node);
      else stack.push(node);
    }
  }
  return stack[0][2][0];
}

// Characters that browsers draw alike, or that mean the same to a reader of a formula.
const kSame = { "∣": "|", "∥": "‖", "‾": "ˉ", "¯": "ˉ", "‐": "-", "ϕ": "φ", "⋅": "·", "∗": "*", "∖": "\\", "−": "-", "⊥": "⟂" };
const kWrappers = new Set(["math", "semantics", "mrow", "mstyle", "mpadded", "menclose"]);
const kTables = new Set(["mtable", "mtr", "mtd"]);
const plain = (text) => [...text.normalize("NFKC")].map((c) => kSame[c] ?? c).join("").replace(/[\u2061-\u2063\u200b\u2009\u00a0\s]/g, "");

// What is drawn: structure and characters, without rows that only group, spaces and attributes.
function drawn(node) {
  if (typeof node === "string") return plain(node);
  const [tag, , children] = node;
  if (tag === "annotation" || tag === "mspace") return "";
  if (kWrappers.has(tag) || ["mi", "mo", "mn", "mtext"].includes(tag)) return children.map(drawn).join("");
  const parts = kTables.has(tag) ? [children.map(drawn).join("")] : children.map(drawn); // each argument apart
  return `<${tag}${parts.map((part) => `{${part}}`).join("")}>`;
}

// KaTeX has room for numbers left and right of an align.
const flat = (tree) => drawn(tree).replace(/<mtr\{<mtd\{\}>(<mtd.*?)<mtd\{\}><mtd\{\}>\}>/g, "<mtr{$1}>");

function same(tex, display) {
  const theirs = readXml(katex.renderToString(tex, { displayMode: display, output: "mathml", throwOnError: true, strict: "ignore" })
    .replace(/^<span[^>]*>|<\/span>$/g, ""));
  return [flat(parseTex(tex, display)), flat(theirs)];
}

let different = 0;
const formulas = readFileSync(new URL("./formulas.txt", import.meta.url), "utf8").trim().split("\n");
for (const tex of formulas) {
  for (const display of [true, false]) {
    if (/\\begin\{align\}/.test(tex) && !display) continue; // KaTeX wants a display
    const [ours, theirs] = same(tex, display);
    if (ours === theirs) continue;
    different++;
    console.log(`${display ? "display" : "inline"} ${tex}\n  ours   ${ours}\n  KaTeX  ${theirs}`);
  }
}
// Where KaTeX's MathML is not what it draws: a fraction's sums are small, and \\limits is \\limits.
assert.equal(flat(parseTex("\\frac{\\sum_i a}{b}", true)), "<mfrac{<msub{∑}{i}>a}{b}>");
assert.equal(flat(parseTex("\\int\\limits_a^b f", false)), "<munderover{∫}{a}{b}>f");

// Fonts: the letters that Unicode has for them.
const letters = (tex) => parseTex(tex)[2][0][2].join("");
assert.deepEqual(["\\mathbf{x}", "\\mathbb{R}", "\\mathbb{k}", "\\mathcal{L}", "\\mathcal{O}", "\\mathfrak{g}", "\\mathsf{T}", "\\mathtt{0}",
  "\\boldsymbol{\\theta}", "\\mathit{h}"].map(letters), ["𝐱", "ℝ", "𝕜", "ℒ", "𝒪", "𝔤", "𝖳", "𝟶", "𝜽", "ℎ"]);
assert.deepEqual(parseTex("\\mathrm{d}")[2][0], ["mi", { mathvariant: "normal" }, ["d"]]);

// Unknown or broken: shown, and nothing is lost or thrown; deep and long ones end.
for (const [tex, shown] of [["\\nobodyknows{x}", "\\nobodyknowsx"], ["\\frac{a", "<mfrac{a}{}>"], ["a}b", "a}b"], ["\\left(", "("], ["x^", "<msup{x}{}>"],
  ["\\begin{nothing}x\\end{nothing}", "\\begin{nothing}x\\endnothing"], ["a & b \\\\ c", "a&bc"], ["\\right)", "\\right)"], ["", ""], ["\\", "\\"]]) {
  assert.equal(flat(parseTex(tex)), shown, tex);
}
parseTex("{".repeat(20000));
parseTex("\\frac".repeat(5000));
parseTex("\\begin{matrix}".repeat(1000));
parseTex("\\left(".repeat(4000));
parseTex("x_".repeat(8000));
parseTex("\\sqrt".repeat(4000));
assert.equal(different, 0, `${different} of ${2 * formulas.length} formulas differ from KaTeX's`);
console.log(`${formulas.length} formulas as KaTeX has them`);
