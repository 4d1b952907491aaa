// Colours and formulas take time in proportion to the text, whatever the text is: what is linear takes some ten
// milliseconds here, what is not takes hundreds. The processor's time counts, since the clock's is anybody's guess on a busy
// machine. And nothing is lost.
import assert from "node:assert";
import { pieces } from "../../web/highlight.js";
import { kLanguages } from "../../web/highlight_languages.js";
import { parseTex } from "../../web/math.js";

const kLength = 10000; // characters
const kMost = 70; // ms
const kCode = [..."\"'`#/*-<={([ \n\\$a1.:@%_", "a ", "a=", "\"a", "a:", "<a", "/*", "'''", "\n#", "(a", "[a", "é"];
const kTex = ["\\frac", "{", "}", "^", "_", "\\left(", "\\right)", "\\begin{matrix}", "&", "\\\\", "x", "1", "\\text", "\\text{", "\\sqrt[", "\\over", "'", "\\mathbf",
  "%", "\\hat", "x_{", "\\color{red}", "[", "\\xrightarrow[", "\\operatorname{"];

function milliseconds(run) {
  const begin = process.cpuUsage();
  run();
  const { user, system } = process.cpuUsage(begin);
  return (user + system) / 1000;
}

function isLinear(what, piece, run) {
  const text = piece.repeat(kLength / piece.length);
  const times = [];
  for (let tries = 0; tries < 3; tries++) {
    times.push(milliseconds(() => run(text)));
    if (times.at(-1) < kMost) return;
  }
  assert.fail(`${what} ${JSON.stringify(piece)}: ${times.join(", ")} ms`);
}

for (const language of Object.keys(kLanguages)) {
  for (const piece of kCode) {
    isLinear(language, piece, (text) => assert.equal(pieces(text, language).map(([, part]) => part).join(""), text));
  }
}
for (const piece of kTex) {
  isLinear("TeX", piece, (text) => {
    try {
      parseTex(text);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error; // too deep: math.js shows the source
    }
  });
}
console.log("linear");
