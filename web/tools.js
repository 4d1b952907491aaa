// Tool servers that the reader has added: which tools they have, which of them models are offered, and which may run
// without a question. Kept in this browser. The servers are spoken to by mcp_worker.js alone.
//   server  { url, token, name, tools: [{ name, description, inputSchema }], off: [tool names], always: [tool names] }
import { read } from "./store.js";
import { scriptUrl } from "./trusted.js";

const kServers = "millrace.tools";
const kLongestName = 64; // of a function, as clients and models know them

const isServer = (one) => typeof one?.url === "string" && [one.tools, one.off, one.always].every(Array.isArray);

export const loadServers = () => [read(kServers)].flat().filter(isServer);

export function saveServers(servers) {
  localStorage.setItem(kServers, JSON.stringify(servers));
}

// Changes the server of this address, as it is stored now.
export function changeServer(url, change) {
  const servers = loadServers();
  const server = servers.find((one) => one.url === url);
  if (server) change(server);
  saveServers(servers);
}

// ---- The worker ----

let worker = null;
let lastId = 0;
const waiting = new Map(); // id -> { resolve, reject }

function start() {
  worker = new Worker(scriptUrl("mcp_worker.js"), { type: "module" });
  worker.addEventListener("message", ({ data }) => {
    const { resolve, reject } = waiting.get(data.id);
    waiting.delete(data.id);
    if (data.error === undefined) resolve(data.result);
    else reject(new Error(data.error));
  });
  worker.addEventListener("error", () => {
    for (const { reject } of waiting.values()) reject(new Error("The part of this page that talks to tool servers could not be started."));
    waiting.clear();
    worker = null;
  });
}

function tell(message, signal) {
  if (!worker) start();
  const id = ++lastId;
  const answer = new Promise((resolve, reject) => waiting.set(id, { resolve, reject }));
  worker.postMessage({ id, ...message });
  signal?.addEventListener("abort", () => worker?.postMessage({ id, cancel: true }));
  return answer;
}

// { name, instructions, tools }. Throws an Error that says what is wrong.
export const connect = (url, token) => tell({ method: "connect", url, token });
export const disconnect = ({ url, token }) => tell({ method: "close", url, token });

// ---- What models are offered ----

const asName = (text) => text.replace(/[^A-Za-z0-9_-]+/g, "_").slice(0, kLongestName);

// [{ name, server, tool }]: name is the function's; tools of one name on two servers get the server's in front.
function offered() {
  const list = loadServers().flatMap((server) => server.tools.filter((tool) => !server.off.includes(tool.name)).map((tool) => ({ server, tool })));
  const taken = new Set();
  return list.map(({ server, tool }) => {
    let name = asName(tool.name);
    if (taken.has(name)) name = asName(`${server.name || new URL(server.url).host}_${tool.name}`);
    while (taken.has(name)) name = `${name.slice(0, kLongestName - 1)}_`;
    taken.add(name);
    return { name, server, tool };
  });
}

// As the API wants them.
export function toolDefinitions() {
  return offered().map(({ name, tool }) => ({
    type: "function",
    function: { name, description: tool.description.slice(0, 4000), parameters: tool.inputSchema },
  }));
}

export const findTool = (name) => offered().find((one) => one.name === name) ?? null;
export const isAlwaysAllowed = ({ server, tool }) => server.always.includes(tool.name);

export function allowAlways({ server, tool }) {
  changeServer(server.url, (one) => one.always.includes(tool.name) || one.always.push(tool.name));
}

// { content, isError }: what went wrong is a result too, since the model has to know.
export async function runTool({ server, tool }, argumentText, signal) {
  let args;
  try {
    args = JSON.parse(argumentText || "{}");
  } catch (error) {
    return { content: `The arguments are no JSON: ${error.message}`, isError: true };
  }
  try {
    const { text, isError } = await tell({ method: "call", url: server.url, token: server.token, name: tool.name, args }, signal);
    return { content: text, isError };
  } catch (error) {
    return { content: error.message, isError: true };
  }
}
