// Pictures that go along with a message: as the API takes them, a PNG or JPEG file in a data URL, and drawn on the page.
// They are kept with the conversation, where there is little room, so large ones are made smaller.
import { el } from "./dom.js";

const kMostBytes = 384 << 10; // of a file that stays as it is
const kMostSide = 1024; // of one that is made smaller, in pixels: models look at fewer
const kThumbnail = 240;

const isPng = (bytes) => bytes[0] === 0x89 && bytes[1] === 0x50;
const isJpeg = (bytes) => bytes[0] === 0xff && bytes[1] === 0xd8;
export const isPicture = (file, bytes) => isPng(bytes) || isJpeg(bytes) || (file.type.startsWith("image/") && file.type !== "image/svg+xml");

function dataUrl(bytes, type) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return `data:${type};base64,${btoa(text)}`;
}

function draw(bitmap, most) {
  const scale = Math.min(1, most / Math.max(bitmap.width, bitmap.height));
  const canvas = el("canvas", { width: Math.max(1, Math.round(bitmap.width * scale)), height: Math.max(1, Math.round(bitmap.height * scale)) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas;
}

// { name, text: "", image }. Throws an Error for what the browser cannot show either.
export async function readPicture(file, bytes) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(new Blob([bytes]));
  } catch {
    throw new Error(`${file.name} is no picture that this browser can read.`);
  }
  if ((isPng(bytes) || isJpeg(bytes)) && bytes.length <= kMostBytes) {
    return { name: file.name, text: "", image: dataUrl(bytes, isPng(bytes) ? "image/png" : "image/jpeg") };
  }
  const blob = await new Promise((resolve) => draw(bitmap, kMostSide).toBlob(resolve, "image/jpeg", 0.85));
  return { name: file.name, text: "", image: dataUrl(new Uint8Array(await blob.arrayBuffer()), "image/jpeg") };
}

// The picture on the page. On a canvas: the page's policy lets no address but its own be shown.
export function pictureView({ name, image }) {
  const figure = el("figure", { class: "picture", role: "img", "aria-label": name });
  const bytes = Uint8Array.from(atob(image.slice(image.indexOf(",") + 1)), (c) => c.charCodeAt(0));
  createImageBitmap(new Blob([bytes])).then(
    (bitmap) => figure.replaceChildren(draw(bitmap, kThumbnail)),
    () => figure.replaceChildren(name),
  );
  return figure;
}
