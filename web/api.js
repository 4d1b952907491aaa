// This server's API: JSON by GET and POST, answers as server-sent events. An API key, when the server wants one, lives in
// this browser's storage and goes nowhere but to this server.
import { events } from "./sse.js";

const kKey = "millrace.key";

export const apiKey = () => localStorage.getItem(kKey) ?? "";

export function setApiKey(key) {
  if (key) localStorage.setItem(kKey, key);
  else localStorage.removeItem(kKey);
}

export class ApiError extends Error {
  constructor(status, message, param) {
    super(param ? `${message} (${param})` : message);
    this.status = status; // 0: no answer at all
  }
}

function headers(extra) {
  const key = apiKey();
  return key ? { ...extra, Authorization: `Bearer ${key}` } : extra;
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(response.status, body?.error?.message ?? `The server answered ${response.status}.`, body?.error?.param);
}

export async function getJson(path) {
  return (await request(path, { headers: headers({}) })).json();
}

export async function postJson(path, body, signal) {
  return (await post(path, body, signal)).json();
}

const post = (path, body, signal) =>
  request(path, { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal });

// The chunks of one streamed answer, of a chat or a completion. Throws ApiError on an error, whether it comes instead of the stream,
// inside it, or as its sudden end.
export async function* streamAnswer(path, body, signal) {
  const response = await post(path, { ...body, stream: true, stream_options: { include_usage: true } }, signal);
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.code ?? 500, chunk.error.message, chunk.error.param);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection broke before the answer was finished.");
  }
  throw new ApiError(0, "The connection ended before the answer was finished.");
}
