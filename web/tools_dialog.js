// The dialog of tool servers: add one by its address, see its tools, offer or hold them back, let them run without a
// question, forget the server.
import { bindDialog, byId, el, iconButton } from "./dom.js";
import { changeServer, connect, disconnect, loadServers, saveServers } from "./tools.js";

const list = byId("tool-servers");
const form = byId("tools-form");
const problem = form.querySelector(".problem");

function fail(message) {
  problem.textContent = message;
  problem.hidden = !message;
}

function toggle(list, name, on) {
  const at = list.indexOf(name);
  if (on && at < 0) list.push(name);
  if (!on && at >= 0) list.splice(at, 1);
}

function toolRow(server, tool) {
  const offers = el("input", { type: "checkbox", checked: !server.off.includes(tool.name), "aria-label": `Offer ${tool.name}` });
  offers.addEventListener("change", () => changeServer(server.url, ({ off }) => toggle(off, tool.name, !offers.checked)));
  const always = el("select", { "aria-label": `When ${tool.name} is called` }, el("option", { value: "" }, "ask each time"),
    el("option", { value: "always" }, "always allow"));
  always.value = server.always.includes(tool.name) ? "always" : "";
  always.addEventListener("change", () => changeServer(server.url, (one) => toggle(one.always, tool.name, always.value !== "")));
  return el("li", {}, offers, el("div", {}, el("b", {}, tool.name), el("small", {}, tool.description.split("\n")[0].slice(0, 200))), always);
}

function serverSection(server) {
  const forget = iconButton("trash", `Forget ${server.name || server.url}`, () => {
    saveServers(loadServers().filter((one) => one.url !== server.url));
    disconnect(server).catch(() => {}); // it is forgotten either way
    show();
    form.url.focus();
  });
  const again = iconButton("again", `Read the tools of ${server.name || server.url} again`, () => add(server.url, server.token));
  const tools = server.tools.length ? el("ul", {}, server.tools.map((tool) => toolRow(server, tool))) : el("p", { class: "mild" }, "It has no tools.");
  return el("section", { "aria-label": server.name || server.url },
    el("header", {}, el("div", {}, el("h3", {}, server.name || "Tool server"), el("small", {}, server.url)), again, forget), tools);
}

function show() {
  const servers = loadServers();
  list.replaceChildren(...servers.map(serverSection));
  byId("open-tools").classList.toggle("on", servers.some((server) => server.tools.length > server.off.length));
}

async function add(url, token) {
  fail("");
  form.setAttribute("aria-busy", "true");
  try {
    const { name, tools } = await connect(url, token);
    const known = loadServers();
    const before = known.find((one) => one.url === url);
    const server = { off: [], always: [], ...before, url, token, name, tools };
    saveServers(before ? known.map((one) => (one.url === url ? server : one)) : [...known, server]);
    form.reset();
    show();
  } catch (error) {
    fail(error.message);
  }
  form.removeAttribute("aria-busy");
}

export function bindTools() {
  const dialog = bindDialog(byId("tools"));
  byId("open-tools").addEventListener("click", () => {
    fail("");
    show();
    dialog.showModal();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const url = form.url.value.trim();
    if (!URL.canParse(url) || !/^https?:$/.test(new URL(url).protocol)) return fail("The address of a tool server begins with http:// or https://.");
    add(url, form.token.value.trim());
  });
  addEventListener("storage", (event) => event.key === "millrace.tools" && show());
  show();
}
