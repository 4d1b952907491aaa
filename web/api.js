// This server's API: JSON by GET, answers as server-sent events. An API key, when the server wants one, lives in
// this browser's storage and goes nowhere but to this server.

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

// The data of each event, as text. Lines may end in CR LF or LF; lines that begin with a colon only keep the line open.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      else if (line === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}

// The chunks of one streamed chat completion. Throws ApiError on an error, whether it comes instead of the stream,
// inside it, or as its sudden end.
export async function* streamChat(body, signal) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
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
