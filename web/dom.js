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
