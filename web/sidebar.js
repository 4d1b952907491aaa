// The list of conversations: choose, export, delete (with a way back), import. On a narrow screen it slides in.
import { byId, el, iconButton } from "./dom.js";
import { loadConversation, loadConversations, readExport, removeConversation, saveConversation, writeExport } from "./store.js";

export function toast(text, action, run) {
  const box = byId("toast");
  clearTimeout(toast.timer);
  const leave = () => (box.hidden = true);
  const button = action && el("button", { type: "button", class: "quiet", onclick: () => (leave(), run()) }, action);
  box.replaceChildren(text, ...(button ? [button] : []));
  box.hidden = false;
  toast.timer = setTimeout(leave, action ? 10000 : 5000);
}

function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const anchor = el("a", { href: url, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const fileName = (title) => `millrace-${title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.json`;

export class Sidebar {
  // page: { current() -> id, open(id), start(), gone(id) }
  constructor(page) {
    this.page = page;
    this.narrow = matchMedia("(max-width: 52rem)");
    this.narrow.addEventListener("change", () => this.slide(false));
    byId("new-chat").addEventListener("click", () => {
      this.slide(false);
      page.start();
    });
    byId("open-sidebar").addEventListener("click", () => this.slide(true));
    byId("close-sidebar").addEventListener("click", () => this.slide(false));
    byId("scrim").addEventListener("click", () => this.slide(false));
    byId("sidebar").addEventListener("keydown", (event) => event.key === "Escape" && this.slide(false));
    byId("export-all").addEventListener("click", () => download("millrace-conversations.json", writeExport(loadConversations())));
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.import(event.target));
    this.slide(false);
  }

  slide(open) {
    const shown = !this.narrow.matches || open;
    const moved = document.body.classList.contains("sidebar-open") !== open;
    document.body.classList.toggle("sidebar-open", open && this.narrow.matches);
    byId("sidebar").inert = !shown;
    byId("scrim").hidden = !this.narrow.matches || !open;
    byId("open-sidebar").setAttribute("aria-expanded", open);
    if (moved && this.narrow.matches) byId(open ? "close-sidebar" : "open-sidebar").focus();
  }

  show() {
    const current = this.page.current();
    const conversations = loadConversations();
    const state = JSON.stringify([current, ...conversations.map(({ id, title }) => [id, title])]);
    if (state === this.shown) return; // whoever is in the list with the keyboard stays there
    this.shown = state;
    byId("conversations").replaceChildren(...conversations.map((one) => this.item(one, one.id === current)));
    byId("export-all").disabled = !conversations.length;
  }

  item({ id, title }, current) {
    const choose = () => {
      this.slide(false);
      this.page.open(id);
    };
    return el("li", { class: current ? "current" : null },
      el("button", { type: "button", class: "title", "aria-current": current ? "true" : null, onclick: choose }, title),
      iconButton("save", `Export: ${title}`, () => download(fileName(title), writeExport([loadConversation(id)]))),
      iconButton("trash", `Delete: ${title}`, () => this.remove(id)));
  }

  remove(id) {
    const kept = loadConversation(id);
    removeConversation(id);
    this.page.gone(id);
    this.show();
    toast("Conversation deleted.", "Undo", () => {
      saveConversation(kept);
      this.show();
      this.page.open(id);
    });
    byId("new-chat").focus();
  }

  async import(input) {
    try {
      const found = readExport(await input.files[0].text());
      found.forEach(saveConversation);
      toast(found.length === 1 ? "One conversation imported." : `${found.length} conversations imported.`);
    } catch (error) {
      toast(`Not imported: ${error.message}.`);
    }
    input.value = "";
    this.show();
  }
}
