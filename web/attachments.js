// Files that go along with a message: their text, however it is had, and how a model is shown it.
import { PdfError, pdfText } from "./pdf_text.js";
import { isPicture, readPicture } from "./pictures.js";

const kMostText = 4 << 20; // characters; no context holds more
const kMostBytes = 64 << 20;

// Text in UTF-8 or UTF-16 by its mark, else as Windows writes it; null when these bytes are no text.
function decode(bytes) {
  const label = bytes[0] === 0xff && bytes[1] === 0xfe ? "utf-16le" : bytes[0] === 0xfe && bytes[1] === 0xff ? "utf-16be" : "utf-8";
  try {
    const text = new TextDecoder(label, { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch {
    const strange = bytes.subarray(0, 65536).filter((byte) => byte < 9 || (byte > 13 && byte < 32) || byte === 127).length;
    return strange ? null : new TextDecoder("windows-1252").decode(bytes);
  }
}

// { name, text, pages, image }. Throws an Error that says why there is nothing to attach.
export async function readAttachment(file) {
  if (file.size > kMostBytes) throw new Error(`${file.name} is larger than 64 MiB.`);
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (!bytes.length) throw new Error(`${file.name} is empty.`);
  if (isPicture(file, bytes)) return readPicture(file, bytes);
  const isPdf = String.fromCharCode(...bytes.subarray(0, 5)) === "%PDF-";
  let found;
  try {
    found = isPdf ? await pdfText(bytes) : { text: decode(bytes) };
  } catch (error) {
    if (!(error instanceof PdfError)) console.warn(error);
    throw new Error(`No text could be taken from ${file.name}: ${error instanceof PdfError ? error.message : "it is damaged"}.`);
  }
  if (found.text === null) throw new Error(`${file.name} is no text, PDF or picture: a model has no use for it.`);
  if (found.text.length > kMostText) throw new Error(`${file.name} has more than 4 million characters of text.`);
  return { name: file.name, text: found.text.replaceAll("\r\n", "\n"), ...(found.pages && { pages: found.pages, empty: found.empty }) };
}

// A fence that the text does not contain.
export function fenceFor(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([run]) => run.length));
  return "`".repeat(longest + 1);
}

// A message as the model reads it: the files first, each under its name; of pictures nothing.
export function withAttachments({ content, attachments = [] }) {
  const files = attachments.filter(({ image }) => !image).map(({ name, text }) => {
    const fence = fenceFor(text);
    return `File "${name}":\n${fence}\n${text.replace(/\n$/, "")}\n${fence}\n\n`;
  });
  return files.join("") + content;
}

// The same as the API takes it: a text, or, with pictures, parts.
export function contentParts(message) {
  const text = withAttachments(message);
  const pictures = (message.attachments ?? []).filter(({ image }) => image);
  if (!pictures.length) return text;
  return [...pictures.map(({ image }) => ({ type: "image_url", image_url: { url: image } })), ...(text ? [{ type: "text", text }] : [])];
}
