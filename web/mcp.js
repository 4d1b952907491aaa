// A client of the Model Context Protocol over its Streamable HTTP transport: JSON-RPC by POST, answers as JSON or as
// server-sent events, a session named by a header. It asks for tools and calls them; what a server asks of us in turn
// is answered with "pong" or a refusal. Runs in mcp_worker.js, and in tests.
import { events } from "./sse.js";

const kVersion = "2025-06-18";
const kLimitMs = 120000; // of one request
const kMostPages = 50; // of a list of tools
const kMethodNotFound = -32601;

export class McpError extends Error {}

export class McpClient {
  constructor(url, token = "", fetcher = (...args) => fetch(...args)) {
    this.url = url;
    this.token = token;
    this.fetch = fetcher;
    this.session = null;
    this.version = null;
    this.lastId = 0;
    this.ready = null; // a promise of being connected
  }

  async post(message, signal) {
    const headers = { "Content-Type": "application/json", Accept: "application/json, text/event-stream" };
    if (this.token) headers.Authorization = `Bearer ${this.token}`;
    if (this.session) headers["Mcp-Session-Id"] = this.session;
    if (this.version) headers["MCP-Protocol-Version"] = this.version;
    try {
      return await this.fetch(this.url, { method: "POST", headers, body: JSON.stringify({ jsonrpc: "2.0", ...message }), signal });
    } catch (error) {
      if (error.name === "AbortError") throw new McpError("Cancelled.");
      if (error.name === "TimeoutError") throw new McpError(`No answer within ${kLimitMs / 1000} seconds.`);
      throw new McpError("The tool server cannot be reached, or does not let this page talk to it (CORS).");
    }
  }

  async notify(method, params = {}) {
    const response = await this.post({ method, params }, AbortSignal.timeout(kLimitMs));
    if (!response.ok) throw new McpError(`${method}: the tool server answered ${response.status}.`);
  }

  // The result of one request, whatever way it comes.
  async request(method, params = {}, signal = null) {
    const id = ++this.lastId;
    const limit = AbortSignal.timeout(kLimitMs);
    const response = await this.post({ id, method, params }, signal ? AbortSignal.any([signal, limit]) : limit);
    if (response.status === 404 && this.session) throw new SessionGone();
    if (response.status === 401 || response.status === 403) throw new McpError(`The tool server refuses us (${response.status}): is its token right?`);
    if (!response.ok) throw new McpError(await said(response));
    if (method === "initialize") this.session = response.headers.get("Mcp-Session-Id");
    const answer = await this.answerTo(id, response, signal).catch((error) => {
      if (error instanceof McpError) throw error;
      throw new McpError(error.name === "AbortError" ? "Cancelled." : `The tool server's answer broke off: ${error.message}`);
    });
    if (answer.error) throw new McpError(answer.error.message ?? `Error ${answer.error.code}.`);
    return answer.result ?? {};
  }

  async answerTo(id, response, signal) {
    const type = response.headers.get("Content-Type") ?? "";
    if (!type.includes("text/event-stream")) {
      const answer = await response.json().catch(() => null);
      if (answer?.id !== id) throw new McpError("The tool server's answer is no JSON-RPC.");
      return answer;
    }
    for await (const data of events(response.body)) {
      if (signal?.aborted) break;
      const message = JSON.parse(data);
      if (message.id === id && ("result" in message || "error" in message)) return message;
      if (message.method && message.id !== undefined) this.refuse(message);
    }
    throw new McpError(signal?.aborted ? "Cancelled." : "The tool server ended its answer too early.");
  }

  refuse({ id, method }) {
    const reply = method === "ping" ? { result: {} } : { error: { code: kMethodNotFound, message: `${method} is not offered` } };
    this.post({ id, ...reply }, AbortSignal.timeout(kLimitMs)).catch(() => {}); // it asked; if it has gone, nobody waits
  }

  connect() {
    this.ready ??= this.initialize().catch((error) => {
      this.ready = null;
      throw error;
    });
    return this.ready;
  }

  async initialize() {
    this.session = this.version = null;
    const params = { protocolVersion: kVersion, capabilities: {}, clientInfo: { name: "millrace", version: "1" } };
    const result = await this.request("initialize", params);
    this.version = result.protocolVersion ?? kVersion;
    await this.notify("notifications/initialized");
    return { name: result.serverInfo?.title ?? result.serverInfo?.name ?? "", instructions: result.instructions ?? "" };
  }

  // After the session was lost on the other side (a restart, for instance) one more attempt with a new one.
  async ask(method, params, signal) {
    await this.connect();
    try {
      return await this.request(method, params, signal);
    } catch (error) {
      if (!(error instanceof SessionGone)) throw error;
      this.ready = null;
      await this.connect();
      return this.request(method, params, signal);
    }
  }

  // [{ name, description, inputSchema }]
  async tools() {
    const found = [];
    let cursor;
    for (let page = 0; page < kMostPages; page++) {
      const { tools = [], nextCursor } = await this.ask("tools/list", cursor ? { cursor } : {});
      found.push(...tools);
      if (!nextCursor) break;
      cursor = nextCursor;
    }
    return found.map(({ name, title, description = "", inputSchema = { type: "object" } }) => ({ name, title, description, inputSchema }));
  }

  // { text, isError }
  async call(name, args, signal) {
    const id = this.lastId + 1;
    try {
      const result = await this.ask("tools/call", { name, arguments: args }, signal);
      return { text: resultText(result), isError: result.isError === true };
    } catch (error) {
      if (signal?.aborted) this.notify("notifications/cancelled", { requestId: id, reason: "the reader stopped it" }).catch(() => {});
      throw error;
    }
  }

  async close() {
    if (!this.session) return;
    const headers = { "Mcp-Session-Id": this.session, ...(this.version && { "MCP-Protocol-Version": this.version }) };
    if (this.token) headers.Authorization = `Bearer ${this.token}`;
    await this.fetch(this.url, { method: "DELETE", headers }).catch(() => {}); // it may not know DELETE
    this.session = this.ready = null;
  }
}

class SessionGone extends McpError {}

async function said(response) {
  const text = await response.text().catch(() => "");
  try {
    return JSON.parse(text).error?.message ?? `The tool server answered ${response.status}.`;
  } catch {
    return `The tool server answered ${response.status}${text && text.length < 200 ? `: ${text}` : "."}`;
  }
}

// What a model can read of a result.
function resultText({ content = [], structuredContent }) {
  const parts = content.map((part) => {
    if (part.type === "text") return part.text;
    if (part.type === "resource" && part.resource?.text) return part.resource.text;
    if (part.type === "resource_link") return part.uri;
    return `[${part.type}${part.mimeType ? `, ${part.mimeType}` : ""}: cannot be shown to a model that reads text]`;
  });
  if (!parts.length && structuredContent !== undefined) return JSON.stringify(structuredContent);
  return parts.join("\n");
}
