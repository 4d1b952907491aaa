// The text of a PDF: pages in order, what their content draws as text, in lines as the positions say. No shapes, no
// pictures of text: those have none, and a file of nothing else is said to have no text.
import { Lexer, Name, Operator, PdfError, PdfFile, Stream } from "./pdf_objects.js";
import { readFont } from "./pdf_fonts.js";

export { PdfError };

const kMostPages = 5000;
const kDeepestForms = 8;
const kIdentity = [1, 0, 0, 1, 0, 0];
// a then b
const times = (a, b) => [a[0] * b[0] + a[1] * b[2], a[0] * b[1] + a[1] * b[3], a[2] * b[0] + a[3] * b[2], a[2] * b[1] + a[3] * b[3],
  a[4] * b[0] + a[5] * b[2] + b[4], a[4] * b[1] + a[5] * b[3] + b[5]];

// Text as it is drawn, put into lines and words by where the pieces lie.
class Page {
  constructor() {
    this.text = "";
    this.end = null; // where the last piece ended, and its size
  }

  add(text, matrix, width) {
    if (!text) return;
    const [a, b, , , x, y] = matrix;
    const size = Math.hypot(matrix[2], matrix[3]) || Math.hypot(a, b) || 1;
    const length = Math.hypot(a, b) || 1;
    const [along, across] = [(x * a + y * b) / length, (y * a - x * b) / length]; // in the direction of writing
    if (this.end) {
      const down = Math.abs(across - this.end.across);
      const gap = along - this.end.along;
      const least = Math.min(size, this.end.size);
      if (down > 0.45 * least) this.line(down > 1.9 * Math.max(size, this.end.size));
      else if ((gap > 0.17 * least || gap < -1.5 * size) && !/\s$/.test(this.text) && !/^\s/.test(text)) this.text += " ";
    }
    this.text += text;
    this.end = { along: along + width * length, across, size };
  }

  line(paragraph) {
    this.text = this.text.replace(/[ \t]+$/, "");
    if (this.text && !this.text.endsWith("\n")) this.text += paragraph ? "\n\n" : "\n";
  }
}

// Runs the operators of a page's content, as far as they say where text goes.
class Interpreter {
  constructor(file, page) {
    this.file = file;
    this.page = page;
    this.fonts = new Map();
    this.state = { matrix: kIdentity, font: null, size: 1, chars: 0, words: 0, scale: 1, leading: 0, rise: 0 };
    this.stack = [];
    this.text = this.line = kIdentity;
  }

  async run(bytes, resources, depth = 0) {
    const lexer = new Lexer(bytes);
    let operands = [];
    for (let item = lexer.next(); item !== undefined; item = lexer.next()) {
      if (!(item instanceof Operator)) {
        operands.push(item);
        continue;
      }
      if (item.text === "BI") this.skipImage(lexer);
      else if (item.text === "Do") await this.form(operands[0], resources, depth);
      else if (item.text === "Tf") await this.useFont(operands, resources);
      else kOperators[item.text]?.(this, ...operands);
      operands = [];
    }
  }

  skipImage(lexer) {
    for (; lexer.at < lexer.bytes.length; lexer.at++) {
      const [a, e, i, b] = lexer.bytes.subarray(lexer.at, lexer.at + 4);
      if (e === 69 && i === 73 && [9, 10, 13, 32].includes(a) && (b === undefined || [9, 10, 13, 32].includes(b))) break;
    }
    lexer.at += 3;
  }

  async form(name, resources, depth) {
    const form = this.lookup(resources, "XObject", name);
    if (!(form instanceof Stream) || form.dict.get("Subtype")?.text !== "Form" || depth >= kDeepestForms) return;
    const before = { ...this.state };
    const matrix = this.file.get(form.dict.get("Matrix"));
    if (Array.isArray(matrix)) this.state.matrix = times(matrix.map((value) => this.file.get(value)), this.state.matrix);
    await this.run(await this.file.data(form), this.file.get(form.dict.get("Resources")) ?? resources, depth + 1);
    this.state = before;
  }

  lookup(resources, kind, name) {
    const table = resources instanceof Map ? this.file.get(resources.get(kind)) : null;
    return name instanceof Name && table instanceof Map ? this.file.get(table.get(name.text)) : null;
  }

  async useFont([name, size], resources) {
    const dict = this.lookup(resources, "Font", name);
    if (dict && !this.fonts.has(dict)) this.fonts.set(dict, await readFont(this.file, dict));
    this.state.font = this.fonts.get(dict) ?? null;
    this.state.size = size;
  }

  move(x, y) {
    this.text = this.line = times([1, 0, 0, 1, x, y], this.line);
  }

  show(bytes) {
    const { font, size, chars, words, scale, rise, matrix } = this.state;
    if (!font || !(bytes instanceof Uint8Array)) return;
    for (const { text, width, isSpace } of font.decode(bytes)) {
      const at = times(times([size * scale, 0, 0, size, 0, rise], this.text), matrix);
      this.page.add(text, at, width);
      this.text = times([1, 0, 0, 1, (width * size + chars + (isSpace ? words : 0)) * scale, 0], this.text);
    }
  }
}

const kOperators = {
  q: (run) => run.stack.push({ ...run.state }),
  Q: (run) => (run.state = run.stack.pop() ?? run.state),
  cm: (run, ...matrix) => (run.state.matrix = times(matrix, run.state.matrix)),
  BT: (run) => (run.text = run.line = kIdentity),
  Tc: (run, value) => (run.state.chars = value),
  Tw: (run, value) => (run.state.words = value),
  Tz: (run, value) => (run.state.scale = value / 100),
  TL: (run, value) => (run.state.leading = value),
  Ts: (run, value) => (run.state.rise = value),
  Td: (run, x, y) => run.move(x, y),
  TD: (run, x, y) => ((run.state.leading = -y), run.move(x, y)),
  Tm: (run, ...matrix) => (run.text = run.line = matrix.length === 6 ? matrix : kIdentity),
  "T*": (run) => run.move(0, -run.state.leading),
  Tj: (run, text) => run.show(text),
  "'": (run, text) => (run.move(0, -run.state.leading), run.show(text)),
  '"': (run, words, chars, text) => {
    Object.assign(run.state, { words, chars });
    run.move(0, -run.state.leading);
    run.show(text);
  },
  TJ(run, items) {
    if (!Array.isArray(items)) return;
    for (const item of items) {
      if (typeof item === "number") run.text = times([1, 0, 0, 1, (-item / 1000) * run.state.size * run.state.scale, 0], run.text);
      else run.show(item);
    }
  },
};

// The pages of the tree, in order, each with the resources that it inherits.
function* pagesOf(file, node, resources, seen = new Set()) {
  if (!(node instanceof Map) || seen.has(node) || seen.size > 4 * kMostPages) return;
  seen.add(node);
  const own = file.get(node.get("Resources")) ?? resources;
  const kids = file.get(node.get("Kids"));
  if (!Array.isArray(kids)) yield { node, resources: own };
  else for (const kid of kids) yield* pagesOf(file, file.get(kid), own, seen);
}

async function pageText(file, { node, resources }) {
  const contents = [file.get(node.get("Contents")) ?? []].flat().map((one) => file.get(one)).filter((one) => one instanceof Stream);
  const parts = await Promise.all(contents.map((stream) => file.data(stream)));
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length + 1, 0)).fill(32);
  parts.reduce((at, part) => (whole.set(part, at), at + part.length + 1), 0);
  const page = new Page();
  await new Interpreter(file, page).run(whole, resources);
  return page.text.trim();
}

// { text, pages, empty }: `empty` counts pages without text. Throws PdfError with a reason a reader understands.
export async function pdfText(bytes) {
  const file = await PdfFile.open(bytes);
  if (file.get(file.trailer.get("Encrypt")) instanceof Map) throw new PdfError("it is encrypted: save it without protection first");
  const root = file.get(file.trailer.get("Root"));
  const tree = root instanceof Map ? file.get(root.get("Pages")) : null;
  const texts = [];
  for (const page of pagesOf(file, tree, null)) {
    if (texts.length >= kMostPages) throw new PdfError(`it has more than ${kMostPages} pages`);
    texts.push(await pageText(file, page));
  }
  if (!texts.length) throw new PdfError("it is damaged: no pages were found");
  const text = texts.filter(Boolean).join("\n\n");
  if (!/[\p{L}\p{N}]/u.test(text)) throw new PdfError("there is no text in it: its pages are pictures, perhaps of a scanner");
  return { text, pages: texts.length, empty: texts.filter((page) => !page).length };
}
