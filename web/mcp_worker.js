// The one place that talks to servers other than ours. The page's policy forbids it to connect anywhere else; this
// worker has a policy of its own (apps/server/assets.cpp) and does nothing but speak MCP to the addresses that the
// reader has entered. Messages: { id, url, token, method, ... } in, { id, result | error } out; { id, cancel } stops one.
import { McpClient } from "./mcp.js";

const clients = new Map(); // url and token -> client
const running = new Map(); // id -> AbortController

function clientOf(url, token) {
  const key = JSON.stringify([url, token]);
  if (!clients.has(key)) clients.set(key, new McpClient(url, token));
  return clients.get(key);
}

async function run({ url, token, method, name, args }, signal) {
  const client = clientOf(url, token);
  if (method === "call") return client.call(name, args, signal);
  if (method === "close") return client.close();
  const about = await client.connect();
  return { ...about, tools: await client.tools() };
}

addEventListener("message", async ({ data }) => {
  if (data.cancel) {
    running.get(data.id)?.abort();
    return;
  }
  const controller = new AbortController();
  running.set(data.id, controller);
  try {
    postMessage({ id: data.id, result: await run(data, controller.signal) });
  } catch (error) {
    postMessage({ id: data.id, error: error.message });
  }
  running.delete(data.id);
});
