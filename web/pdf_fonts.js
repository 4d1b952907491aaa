// What the bytes of a PDF's strings mean: characters by a font's ToUnicode map, or by its encoding when it has none,
// and how wide each is, in units of the font's size.
import { Lexer, Name, Operator, Stream } from "./pdf_objects.js";

const kDefaultWidth = 0.5;

// Names of glyphs that are not their own character. Accented letters are put together from a letter and an accent.
const kGlyphWords = `exclam ! quotedbl " numbersign # dollar $ percent % ampersand & quotesingle ' parenleft ( parenright ) asterisk * plus +
  comma , hyphen - period . slash / zero 0 one 1 two 2 three 3 four 4 five 5 six 6 seven 7 eight 8 nine 9 colon : semicolon ; less < equal =
  greater > question ? at @ bracketleft [ backslash \\ bracketright ] asciicircum ^ underscore _ grave \` braceleft { bar | braceright }
  asciitilde ~ quoteleft ‘ quoteright ’ quotedblleft “ quotedblright ” quotesinglbase ‚ quotedblbase „ guillemotleft « guillemotright »
  guilsinglleft ‹ guilsinglright › endash – emdash — bullet • ellipsis … dagger † daggerdbl ‡ paragraph ¶ section § degree ° copyright ©
  registered ® trademark ™ cent ¢ sterling £ yen ¥ Euro € currency ¤ florin ƒ fraction ⁄ multiply × divide ÷ plusminus ± minus − mu µ
  onesuperior ¹ twosuperior ² threesuperior ³ onehalf ½ onequarter ¼ threequarters ¾ exclamdown ¡ questiondown ¿ germandbls ß ae æ AE Æ
  oe œ OE Œ oslash ø Oslash Ø eth ð Eth Ð thorn þ Thorn Þ lslash ł Lslash Ł dotlessi ı fi fi fl fl ff ff ffi ffi ffl ffl periodcentered ·
  brokenbar ¦ logicalnot ¬ macron ¯ acute ´ cedilla ¸ dieresis ¨ circumflex ˆ tilde ˜ ring ˚ caron ˇ breve ˘ dotaccent ˙ alpha α beta β
  gamma γ delta δ epsilon ε theta θ lambda λ pi π sigma σ omega ω infinity ∞ summation ∑ integral ∫ partialdiff ∂ radical √ approxequal ≈
  notequal ≠ lessequal ≤ greaterequal ≥ arrowright → arrowleft ←`.split(/\s+/);
const kGlyphs = new Map([["space", " "], ["nbspace", "\u00a0"]]);
for (let i = 0; i < kGlyphWords.length; i += 2) kGlyphs.set(kGlyphWords[i], kGlyphWords[i + 1]);
const kAccents = { acute: "\u0301", grave: "\u0300", dieresis: "\u0308", circumflex: "\u0302", tilde: "\u0303", ring: "\u030a", cedilla: "\u0327",
  caron: "\u030c", macron: "\u0304", breve: "\u0306", ogonek: "\u0328", dotaccent: "\u0307", hungarumlaut: "\u030b" };

function glyphText(name) {
  const known = kGlyphs.get(name);
  if (known) return known;
  if (/^[A-Za-z]$/.test(name)) return name;
  const code = /^uni([0-9A-F]{4})$|^u([0-9A-F]{4,6})$/.exec(name);
  if (code) return String.fromCodePoint(Math.min(parseInt(code[1] ?? code[2], 16), 0x10ffff));
  const accented = /^([A-Za-z])([a-z]+)$/.exec(name);
  if (accented && kAccents[accented[2]]) return (accented[1] + kAccents[accented[2]]).normalize();
  return name.includes(".") ? glyphText(name.split(".")[0]) : "";
}

const standard = (code) => ({ 39: "’", 96: "‘" })[code] ?? (code < 127 ? String.fromCharCode(code) : kStandardHigh[code] ?? "");
const kStandardHigh = { 161: "¡", 162: "¢", 163: "£", 164: "⁄", 165: "¥", 166: "ƒ", 167: "§", 168: "¤", 169: "'", 170: "“", 171: "«", 172: "‹", 173: "›",
  174: "fi", 175: "fl", 177: "–", 178: "†", 179: "‡", 180: "·", 182: "¶", 183: "•", 184: "‚", 185: "„", 186: "”", 187: "»", 188: "…", 189: "‰",
  191: "¿", 208: "—", 225: "Æ", 232: "Ł", 233: "Ø", 234: "Œ", 241: "æ", 245: "ı", 248: "ł", 249: "ø", 250: "œ", 251: "ß" };
const decoderOf = (label) => {
  const table = new TextDecoder(label).decode(Uint8Array.from({ length: 256 }, (_, i) => i));
  return (code) => table[code];
};
const kEncodings = { WinAnsiEncoding: "windows-1252", MacRomanEncoding: "macintosh" };

// ---- ToUnicode ----

const numberOf = (bytes) => bytes.reduce((sum, byte) => sum * 256 + byte, 0);
const utf16 = (bytes) => new TextDecoder("utf-16be").decode(bytes);

// "0041" plus 3 is "0044": the last unit counts up.
function plus(bytes, steps) {
  const next = Uint8Array.from(bytes);
  for (let i = next.length - 1, carry = steps; i >= 0 && carry; i--) {
    carry += next[i];
    next[i] = carry & 255;
    carry >>= 8;
  }
  return next;
}

// { texts: code -> text, lengths: how many bytes codes have }
export function readCMap(bytes) {
  const map = { texts: new Map(), lengths: new Set() };
  const lexer = new Lexer(bytes);
  let operands = [];
  for (let item = lexer.next(); item !== undefined; item = lexer.next()) {
    if (!(item instanceof Operator)) {
      operands.push(item);
      continue;
    }
    if (item.text === "endcodespacerange") operands.filter((one) => one instanceof Uint8Array).forEach((code) => map.lengths.add(code.length));
    else if (item.text === "endbfchar") addChars(map, operands);
    else if (item.text === "endbfrange") addRanges(map, operands);
    operands = [];
  }
  return map;
}

function addChars({ texts }, operands) {
  for (let i = 0; i + 1 < operands.length; i += 2) {
    const [code, to] = [operands[i], operands[i + 1]];
    if (code instanceof Uint8Array && to instanceof Uint8Array) texts.set(numberOf(code), utf16(to));
  }
}

function addRanges({ texts }, operands) {
  for (let i = 0; i + 2 < operands.length; i += 3) {
    const [first, last, to] = operands.slice(i, i + 3);
    if (!(first instanceof Uint8Array) || !(last instanceof Uint8Array)) continue;
    const [from, until] = [numberOf(first), Math.min(numberOf(last), numberOf(first) + 0xffff)];
    for (let code = from; code <= until; code++) {
      const target = Array.isArray(to) ? to[code - from] : to;
      if (target instanceof Uint8Array) texts.set(code, utf16(Array.isArray(to) ? target : plus(target, code - from)));
    }
  }
}

// ---- Fonts ----

class Font {
  constructor(length, textOf, widthOf) {
    this.length = length; // bytes of a code
    this.textOf = textOf;
    this.widthOf = widthOf;
  }

  decode(bytes) {
    const list = [];
    for (let at = 0; at + this.length <= bytes.length; at += this.length) {
      const code = this.length === 2 ? bytes[at] * 256 + bytes[at + 1] : bytes[at];
      list.push({ text: this.textOf(code), width: this.widthOf(code), isSpace: this.length === 1 && code === 32 });
    }
    return list;
  }
}

function simpleText(file, dict) {
  const encoding = file.get(dict.get("Encoding"));
  const base = encoding instanceof Name ? encoding.text : file.get(encoding?.get?.("BaseEncoding"))?.text;
  const texts = kEncodings[base] ? decoderOf(kEncodings[base]) : standard;
  const differences = new Map();
  let code = 0;
  for (const item of file.get(encoding?.get?.("Differences")) ?? []) {
    const value = file.get(item);
    if (typeof value === "number") code = value;
    else if (value instanceof Name) differences.set(code++, glyphText(value.text));
  }
  return (at) => differences.get(at) ?? texts(at) ?? "";
}

function simpleWidths(file, dict) {
  const first = file.get(dict.get("FirstChar")) ?? 0;
  const widths = file.get(dict.get("Widths"));
  const unit = dict.get("Subtype")?.text === "Type3" ? Math.abs(file.get(file.get(dict.get("FontMatrix"))?.[0]) ?? 0.001) : 0.001;
  return (code) => {
    const width = Array.isArray(widths) ? file.get(widths[code - first]) : null;
    return typeof width === "number" ? width * unit : kDefaultWidth;
  };
}

// The W array: 10 [500 600] gives widths from 10 on, 20 30 500 one width for all of them.
function cidWidths(file, dict) {
  const usual = (file.get(dict.get("DW")) ?? 1000) / 1000;
  const widths = new Map();
  const list = [file.get(dict.get("W")) ?? []].flat().map((item) => file.get(item));
  for (let i = 0; i + 1 < list.length; ) {
    if (Array.isArray(list[i + 1])) {
      list[i + 1].forEach((width, n) => widths.set(list[i] + n, file.get(width) / 1000));
      i += 2;
    } else {
      for (let code = list[i]; code <= Math.min(list[i + 1], list[i] + 0xffff); code++) widths.set(code, list[i + 2] / 1000);
      i += 3;
    }
  }
  return (code) => widths.get(code) ?? usual;
}

export async function readFont(file, dict) {
  if (!(dict instanceof Map)) return null;
  const stream = file.get(dict.get("ToUnicode"));
  const map = stream instanceof Stream ? readCMap(await file.data(stream)) : null;
  if (dict.get("Subtype")?.text === "Type0") {
    const found = file.get(file.get(dict.get("DescendantFonts"))?.[0]);
    const descendant = found instanceof Map ? found : new Map();
    const length = map?.lengths.size === 1 && map.lengths.has(1) ? 1 : 2;
    return new Font(length, (code) => map?.texts.get(code) ?? "", cidWidths(file, descendant));
  }
  const plain = simpleText(file, dict);
  return new Font(1, (code) => map?.texts.get(code) ?? plain(code), simpleWidths(file, dict));
}
