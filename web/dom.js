// Elements from code, never from strings: what is passed as text stays text.

const kSvg = "http://www.w3.org/2000/svg";

function build(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

// el("button", { class: "quiet", onclick: f }, "Copy"); a child is a node, a text, nothing, or a list of those
export function el(tag, props = {}, ...children) {
  return build(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return build(document.createElementNS(kSvg, tag), props, children);
}

export const byId = (id) => document.getElementById(id);

// Strokes on a 24 x 24 grid.
const kIcons = {
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  menu: "M4 7h16M4 12h16M4 17h10",
  chart: "M4 20V4M4 20h16M8 16v-4M12 16V8M16 16v-6",
  chat: "M5 5h14v10H11l-4 4v-4H5z",
  sliders: "M4 8h8M18 8h2M4 16h2M12 16h8M15 5v6M9 13v6",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  down: "M12 5v14M6 13l6 6 6-6",
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 13l4 4L19 7",
  edit: "M5 19l1-4L16 5l3 3L9 18z",
  again: "M19 12a7 7 0 1 1-2-5M19 4v4h-4",
  save: "M12 4v11M7 10l5 5 5-5M5 20h14",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  tool: "M14 6a4 4 0 0 1 5 5l-8 8-4-4 8-8zM5 19l2-2",
  search: "M11 5a6 6 0 1 0 0 12a6 6 0 0 0 0-12M16 16l4 4",
  attach: "M19 11l-7.5 7.5a4.5 4.5 0 0 1-6.4-6.4L13 4.3a3 3 0 0 1 4.2 4.2l-7.6 7.6a1.5 1.5 0 0 1-2.1-2.1L14 7.5",
  file: "M7 3h7l4 4v14H7zM14 3v4h4M10 13h5M10 17h5",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  onward: "M5 6l7 6-7 6zM13 6l7 6-7 6z",
  plug: "M9 4v5M15 4v5M6 9h12v3a6 6 0 0 1-12 0zM12 18v3",
  help: "M9 9.5a3 3 0 1 1 4.2 2.7c-.8.4-1.2 1-1.2 2M12 18v.01",
  theme: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
};

export function icon(name) {
  const shape = svg("path", { d: kIcons[name] });
  return svg("svg", { class: "glyph", viewBox: "0 0 24 24", "aria-hidden": "true" }, shape);
}

// Fills in the icons that the HTML names by data-icon.
export function drawIcons(root = document) {
  for (const node of root.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
}

// A button with an icon alone: its label is for the ear and the pointer.
export function iconButton(name, label, onclick) {
  return el("button", { type: "button", class: "quiet icon", "aria-label": label, title: label, onclick }, icon(name));
}

export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { class: "hidden" }); // plain http elsewhere than localhost has no clipboard object
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("the browser refused");
}

// Hands a file to the reader.
export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// A line that appears for a while, with something that can be done about it.
export function toast(text, action, run) {
  const box = byId("toast");
  clearTimeout(toast.timer);
  const leave = () => (box.hidden = true);
  const button = action && el("button", { type: "button", class: "quiet", onclick: () => (leave(), run()) }, action);
  box.replaceChildren(text, ...(button ? [button] : []));
  box.hidden = false;
  toast.timer = setTimeout(leave, action ? 10000 : 5000);
}

// A dialog that its close button and a click beside it close.
export function bindDialog(dialog) {
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close());
  return dialog;
}

// A copy button that says that it worked.
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    const [name, said] = await copyText(text()).then(() => ["check", "Copied"], () => ["close", "Copying failed"]);
    button.replaceChildren(icon(name));
    button.setAttribute("aria-label", said);
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}
