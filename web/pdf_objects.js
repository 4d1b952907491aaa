// PDF files as objects: numbers, names, strings, lists, dictionaries, streams. Objects are found by reading the file
// for "12 0 obj" instead of by its table of positions: that needs no table to be right, and sees what later revisions
// replaced, since a later object of the same number wins. Objects inside object streams are found when those are read.

export class Name {
  constructor(text) {
    this.text = text;
  }
}
export class Ref {
  constructor(number) {
    this.number = number;
  }
}
export class Stream {
  constructor(dict, bytes) {
    this.dict = dict;
    this.bytes = bytes;
  }
}
export class Operator {
  constructor(text) {
    this.text = text;
  }
}
export class PdfError extends Error {}

const kSpace = new Set([0, 9, 10, 12, 13, 32]);
const kDelimiter = new Set([..."()<>[]{}/%"].map((c) => c.charCodeAt(0)));
const kDeepest = 64;
const kMostBytes = 256 << 20; // of one stream, unpacked
const isRegular = (byte) => byte !== undefined && !kSpace.has(byte) && !kDelimiter.has(byte);
const hexDigit = (byte) => parseInt(String.fromCharCode(byte), 16);
const latin = (bytes) => {
  let text = "";
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return text;
};

// Reads objects and operators from bytes. Strings come as bytes, dictionaries as Maps.
export class Lexer {
  constructor(bytes, at = 0) {
    this.bytes = bytes;
    this.at = at;
    this.depth = 0;
  }

  skip() {
    for (; this.at < this.bytes.length; this.at++) {
      const byte = this.bytes[this.at];
      if (byte === 37) while (this.at < this.bytes.length && this.bytes[this.at] !== 10 && this.bytes[this.at] !== 13) this.at++;
      else if (!kSpace.has(byte)) return;
    }
  }

  word() {
    const from = this.at;
    while (isRegular(this.bytes[this.at])) this.at++;
    return latin(this.bytes.subarray(from, this.at));
  }

  // undefined at the end
  next() {
    this.skip();
    const byte = this.bytes[this.at];
    if (byte === undefined) return undefined;
    const c = String.fromCharCode(byte);
    if (c === "/") return this.name();
    if (c === "(") return this.literal();
    if (c === "<") return this.bytes[this.at + 1] === 60 ? this.dictionary() : this.hex();
    if (c === "[") return this.list();
    if (!isRegular(byte)) {
      this.at += c === ">" && this.bytes[this.at + 1] === 62 ? 2 : 1;
      return new Operator(c === ">" ? ">>" : c);
    }
    const word = this.word();
    if (/^[+-]?(\d+\.?\d*|\.\d+)$/.test(word)) return Number(word);
    if (/^[+-]*[\d.][\d.-]*$/.test(word)) return parseFloat(word.replace(/^[+-]*/, (signs) => (signs.includes("-") ? "-" : ""))) || 0;
    return { true: true, false: false, null: null }[word] ?? new Operator(word);
  }

  name() {
    this.at++;
    return new Name(this.word().replace(/#([0-9a-fA-F]{2})/g, (_, hex) => String.fromCharCode(parseInt(hex, 16))));
  }

  literal() {
    const out = [];
    this.at++;
    for (let open = 1; this.at < this.bytes.length; ) {
      let byte = this.bytes[this.at++];
      if (byte === 92) {
        byte = this.escaped();
        if (byte === null) continue;
      } else if (byte === 40) open++;
      else if (byte === 41 && --open === 0) break;
      out.push(byte);
    }
    return Uint8Array.from(out);
  }

  escaped() {
    const byte = this.bytes[this.at++];
    const known = { n: 10, r: 13, t: 9, b: 8, f: 12 }[String.fromCharCode(byte)];
    if (known !== undefined) return known;
    if (byte === 13 || byte === 10) {
      if (byte === 13 && this.bytes[this.at] === 10) this.at++;
      return null; // the line goes on
    }
    if (byte < 48 || byte > 55) return byte;
    let value = byte - 48;
    for (let digits = 1; digits < 3 && this.bytes[this.at] >= 48 && this.bytes[this.at] <= 55; digits++) {
      value = value * 8 + this.bytes[this.at++] - 48;
    }
    return value & 255;
  }

  hex() {
    const digits = [];
    for (this.at++; this.at < this.bytes.length && this.bytes[this.at] !== 62; this.at++) {
      const digit = hexDigit(this.bytes[this.at]);
      if (!Number.isNaN(digit)) digits.push(digit);
    }
    this.at++;
    if (digits.length % 2) digits.push(0);
    return Uint8Array.from({ length: digits.length / 2 }, (_, i) => digits[2 * i] * 16 + digits[2 * i + 1]);
  }

  // Objects up to a closing mark; "12 0 R" becomes one.
  until(closer) {
    if (++this.depth > kDeepest) throw new PdfError("its objects are nested too deeply");
    const items = [];
    for (let item = this.next(); item !== undefined; item = this.next()) {
      if (item instanceof Operator) {
        if (item.text === closer) break;
        if (item.text === "R" && items.length > 1) items.push(new Ref(items.splice(-2)[0]));
        else if (item.text === "endobj" || item.text === "stream") break; // it was never closed
      } else items.push(item);
    }
    this.depth--;
    return items;
  }

  list() {
    this.at++;
    return this.until("]");
  }

  dictionary() {
    this.at += 2;
    const items = this.until(">>");
    const dict = new Map();
    for (let i = 0; i + 1 < items.length; i += 2) if (items[i] instanceof Name) dict.set(items[i].text, items[i + 1]);
    return dict;
  }
}

// ---- Filters ----

// What could be unpacked, even when the end is broken.
async function inflate(bytes, format = "deflate") {
  const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream(format)).getReader();
  const parts = [];
  let size = 0;
  try {
    for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
      size += value.length;
      if (size > kMostBytes) throw new PdfError("a part of it unpacks to more than 256 MiB");
      parts.push(value);
    }
  } catch (error) {
    if (error instanceof PdfError) throw error;
    if (!size && format === "deflate" && bytes.length > 2) return inflate(bytes.subarray(2), "deflate-raw");
  }
  const whole = new Uint8Array(size);
  parts.reduce((at, part) => (whole.set(part, at), at + part.length), 0);
  return whole;
}

// PNG's predictors, row by row.
function unpredict(bytes, colors, bits, columns) {
  const pixel = Math.max(1, (colors * bits) >> 3);
  const width = (colors * bits * columns + 7) >> 3;
  const rows = Math.floor(bytes.length / (width + 1));
  const out = new Uint8Array(rows * width);
  for (let row = 0; row < rows; row++) {
    const kind = bytes[row * (width + 1)];
    const to = row * width;
    for (let i = 0; i < width; i++) {
      const left = i >= pixel ? out[to + i - pixel] : 0;
      const up = row ? out[to + i - width] : 0;
      const corner = row && i >= pixel ? out[to + i - width - pixel] : 0;
      const near = [0, left, up, (left + up) >> 1, paeth(left, up, corner)][kind] ?? 0;
      out[to + i] = bytes[row * (width + 1) + 1 + i] + near;
    }
  }
  return out;
}

function paeth(left, up, corner) {
  const [a, b, c] = [up - corner, left - corner, left + up - 2 * corner].map(Math.abs);
  return a <= b && a <= c ? left : b <= c ? up : corner;
}

function ascii85(bytes) {
  const out = [];
  let digits = [];
  const flush = (count) => {
    while (digits.length < 5) digits.push(84);
    const value = digits.reduce((sum, digit) => sum * 85 + digit, 0);
    for (let i = 0; i < count; i++) out.push(Math.floor(value / 256 ** (3 - i)) & 255);
    digits = [];
  };
  for (const byte of bytes) {
    if (byte === 126) break;
    if (byte === 122 && !digits.length) out.push(0, 0, 0, 0);
    else if (byte >= 33 && byte <= 117 && digits.push(byte - 33) === 5) flush(4);
  }
  if (digits.length > 1) flush(digits.length - 1);
  return Uint8Array.from(out);
}

function lzw(bytes, early = 1) {
  const out = [];
  let table = [];
  let [bits, buffer, held, last] = [9, 0, 0, null];
  const reset = () => {
    table = Array.from({ length: 258 }, (_, i) => (i < 256 ? [i] : []));
    bits = 9;
    last = null;
  };
  reset();
  for (const byte of bytes) {
    buffer = (buffer << 8) | byte;
    held += 8;
    if (held < bits) continue;
    held -= bits;
    const code = (buffer >> held) & ((1 << bits) - 1);
    buffer &= (1 << held) - 1;
    if (code === 257) break;
    if (code === 256) {
      reset();
      continue;
    }
    const entry = table[code] ?? (last ? [...last, last[0]] : []);
    out.push(...entry);
    if (last && table.length < 4096) table.push([...last, entry[0]]);
    last = entry;
    if (table.length + early >= 1 << bits && bits < 12) bits++;
  }
  return Uint8Array.from(out);
}

// ---- The file ----

export class PdfFile {
  static async open(bytes) {
    const file = new PdfFile(bytes);
    if (!latin(bytes.subarray(0, 1024)).includes("%PDF-")) throw new PdfError("it is no PDF");
    file.scan();
    await file.openObjectStreams();
    return file;
  }

  constructor(bytes) {
    this.bytes = bytes;
    this.offsets = new Map(); // object number -> where it begins
    this.objects = new Map(); // object number -> what has been read
    this.trailer = new Map();
  }

  scan() {
    // Objects and trailers in the order of the file. Only the ends of the pattern are tried at each "obj".
    const text = latin(this.bytes);
    for (const match of text.matchAll(/(?<![\d])(\d{1,10})[ \t\r\n]{1,4}\d{1,5}[ \t\r\n]{1,4}obj(?![a-z])|\btrailer\b/g)) {
      if (match[1]) this.offsets.set(Number(match[1]), match.index + match[0].length);
      else this.addTrailer(new Lexer(this.bytes, match.index + 7).next());
    }
    for (const [number, offset] of this.offsets) {
      const head = text.slice(offset, offset + 400);
      if (/\/(XRef|ObjStm)\b/.test(head)) this.object(number);
    }
  }

  addTrailer(dict) {
    if (!(dict instanceof Map)) return;
    for (const key of ["Root", "Encrypt", "Info"]) if (dict.has(key)) this.trailer.set(key, dict.get(key));
  }

  // The object of a number, as it stands in the file.
  object(number) {
    if (this.objects.has(number)) return this.objects.get(number);
    if (!this.offsets.has(number)) return null;
    this.objects.set(number, null); // should it name itself
    const lexer = new Lexer(this.bytes, this.offsets.get(number));
    let value = lexer.next();
    if (typeof value === "number") value = this.maybeRef(lexer, value);
    if (value instanceof Map) value = this.maybeStream(lexer, value);
    this.objects.set(number, value);
    if (value instanceof Stream && value.dict.get("Type")?.text === "XRef") this.addTrailer(value.dict);
    return value;
  }

  maybeRef(lexer, number) {
    const [, letter] = [lexer.next(), lexer.next()];
    return letter instanceof Operator && letter.text === "R" ? new Ref(number) : number;
  }

  maybeStream(lexer, dict) {
    lexer.skip();
    if (latin(this.bytes.subarray(lexer.at, lexer.at + 6)) !== "stream") return dict;
    let from = lexer.at + 6;
    if (this.bytes[from] === 13) from++;
    if (this.bytes[from] === 10) from++;
    const length = this.get(dict.get("Length"));
    const ends = (at) => /^\s*endstream/.test(latin(this.bytes.subarray(at, at + 20)));
    let to = from + (length ?? -1);
    if (!(to >= from) || !ends(to)) {
      to = from; // the length is wrong: look for the end
      while (to < this.bytes.length && !(this.bytes[to] === 101 && latin(this.bytes.subarray(to, to + 9)) === "endstream")) to++;
    }
    return new Stream(dict, this.bytes.subarray(from, to));
  }

  // What a reference leads to; anything else is itself.
  get(value) {
    for (let steps = 0; value instanceof Ref && steps < 32; steps++) value = this.object(value.number);
    return value instanceof Ref ? null : value;
  }

  async openObjectStreams() {
    for (const number of [...this.offsets.keys()]) {
      const stream = this.objects.get(number);
      if (!(stream instanceof Stream) || stream.dict.get("Type")?.text !== "ObjStm") continue;
      const offset = this.offsets.get(number);
      const bytes = await this.data(stream);
      const [count, first] = [this.get(stream.dict.get("N")), this.get(stream.dict.get("First"))];
      const header = new Lexer(bytes);
      for (let i = 0; i < count; i++) {
        const [inner, at] = [header.next(), header.next()];
        if (typeof inner !== "number" || typeof at !== "number") break;
        if ((this.offsets.get(inner) ?? -1) > offset) continue; // replaced by a later revision
        this.offsets.set(inner, offset);
        this.objects.set(inner, new Lexer(bytes, first + at).next() ?? null);
      }
    }
  }

  // A stream's bytes with its filters undone.
  async data(stream) {
    const listOf = (value) => [this.get(value) ?? []].flat().map((one) => this.get(one));
    const filters = listOf(stream.dict.get("Filter") ?? stream.dict.get("F"));
    const parameters = listOf(stream.dict.get("DecodeParms") ?? stream.dict.get("DP"));
    let bytes = stream.bytes;
    for (const [i, filter] of filters.entries()) {
      bytes = await this.unfilter(filter?.text, bytes, parameters[i] instanceof Map ? parameters[i] : new Map());
    }
    return bytes;
  }

  async unfilter(name, bytes, parameters) {
    const number = (key, otherwise) => this.get(parameters.get(key)) ?? otherwise;
    const unpredicted = (unpacked) => (number("Predictor", 1) < 10 ? unpacked
      : unpredict(unpacked, number("Colors", 1), number("BitsPerComponent", 8), number("Columns", 1)));
    if (name === "FlateDecode" || name === "Fl") return unpredicted(await inflate(bytes));
    if (name === "LZWDecode" || name === "LZW") return unpredicted(lzw(bytes, number("EarlyChange", 1)));
    if (name === "ASCII85Decode" || name === "A85") return ascii85(bytes);
    if (name === "ASCIIHexDecode" || name === "AHx") return new Lexer(Uint8Array.from([60, ...bytes, 62])).hex();
    return new Uint8Array(0); // pictures: no text in them
  }
}
