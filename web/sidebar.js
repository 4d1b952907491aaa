// The list of conversations: choose, search, rename, export, delete (with a way back), import. On a narrow screen it
// slides in.
import { byId, download, el, iconButton, toast } from "./dom.js";
import { loadConversation, loadConversations, readExport, removeConversation, saveConversation, searchIn, writeExport } from "./store.js";

const fileName = (title) => `millrace-${title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.json`;

// A text with what was searched for marked in it.
function marked(text, query) {
  const at = text.toLowerCase().indexOf(query.toLowerCase());
  if (at < 0) return [text];
  return [text.slice(0, at), el("mark", {}, text.slice(at, at + query.length)), text.slice(at + query.length)];
}

export class Sidebar {
  // page: { current() -> id, open(id), start(), gone(id), renamed(id, title) }
  constructor(page) {
    this.page = page;
    this.search = byId("search");
    this.narrow = matchMedia("(max-width: 52rem)");
    this.narrow.addEventListener("change", () => this.slide(false));
    byId("new-chat").addEventListener("click", () => {
      this.slide(false);
      page.start();
    });
    byId("open-sidebar").addEventListener("click", () => this.slide(true));
    byId("close-sidebar").addEventListener("click", () => this.slide(false));
    byId("scrim").addEventListener("click", () => this.slide(false));
    byId("sidebar").addEventListener("keydown", (event) => event.key === "Escape" && this.leave(event));
    byId("export-all").addEventListener("click", () => download("millrace-conversations.json", writeExport(loadConversations())));
    byId("import").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", (event) => this.import(event.target));
    this.search.addEventListener("input", () => this.show());
    this.slide(false);
  }

  // Escape first clears the search, then closes the list.
  leave(event) {
    if (this.search.value) {
      event.stopPropagation();
      this.search.value = "";
      this.show();
    } else this.slide(false);
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

  focusSearch() {
    if (this.narrow.matches) this.slide(true);
    this.search.focus();
    this.search.select();
  }

  show() {
    const current = this.page.current();
    const query = this.search.value.trim();
    const all = loadConversations();
    const found = all.map((one) => ({ ...one, snippet: query ? searchIn(one, query) : "" })).filter(({ snippet }) => snippet !== null);
    const state = JSON.stringify([current, query, ...found.map(({ id, title, snippet }) => [id, title, snippet])]);
    if (state === this.shown) return; // whoever is in the list with the keyboard stays there
    this.shown = state;
    byId("conversations").replaceChildren(...found.map((one) => this.item(one, one.id === current, query)));
    byId("nothing-found").hidden = !query || found.length > 0;
    byId("export-all").disabled = !all.length;
    this.ids = found.map(({ id }) => id);
  }

  // The conversation before (-1) or after (1) the one that is shown.
  step(by) {
    const at = this.ids.indexOf(this.page.current());
    const to = this.ids[at < 0 ? 0 : at + by];
    if (to) this.page.open(to);
  }

  item({ id, title, snippet }, current, query) {
    const choose = () => {
      this.slide(false);
      this.page.open(id);
    };
    const name = el("button", { type: "button", class: "title", "aria-current": current ? "true" : null, title, onclick: choose },
      el("span", {}, query ? marked(title, query) : title), snippet ? el("small", {}, marked(snippet, query)) : null);
    const row = el("li", { class: current ? "current" : null }, name,
      iconButton("edit", `Rename: ${title}`, () => this.rename(row, id, title)),
      iconButton("save", `Export: ${title}`, () => download(fileName(title), writeExport([loadConversation(id)]))),
      iconButton("trash", `Delete: ${title}`, () => this.remove(id)));
    name.addEventListener("dblclick", () => this.rename(row, id, title));
    return row;
  }

  rename(row, id, title) {
    const field = el("input", { "aria-label": "New name", maxlength: 120 });
    field.value = title;
    let left = false;
    const leave = (keep) => {
      if (left) return;
      left = true;
      const name = field.value.trim();
      if (keep && name && name !== title) this.page.renamed(id, name);
      this.shown = ""; // draw the row anew
      this.show();
      byId("conversations").querySelector(".current .title")?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      event.stopPropagation();
      leave(event.key === "Enter");
    });
    field.addEventListener("blur", () => leave(true));
    row.replaceChildren(field);
    field.focus();
    field.select();
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
