// The service worker: keeps the page's own files, so that it opens when the server is not there. The server is asked
// first, always: what is kept is a spare, never a version that lags behind. Only the files named here are kept or even
// looked at; what the API answers never is.

const kCache = "millrace-shell";
const kShell = [
  "./", "api.js", "attachments.js", "branches.js", "chart.js", "chat.css", "chat.js", "composer.js", "dashboard.css", "dashboard.html",
  "dashboard.js", "dialogs.css", "dom.js", "highlight.js", "highlight_languages.js", "icon-192.png", "icon-512.png", "icon-maskable-512.png",
  "icon.svg", "index.html", "manifest.webmanifest", "markdown.js", "markdown_export.js", "markdown_inline.js", "math.js", "math_symbols.js",
  "math_tables.js", "mcp.js", "mcp_worker.js", "message_view.js", "models.js", "pdf_fonts.js", "pdf_objects.js", "pdf_text.js", "pictures.js", "prose.css",
  "ranks.js", "settings.js", "shortcuts.js", "sidebar.js", "sse.js", "store.js", "style.css", "theme.js", "tool_loop.js", "tool_view.js", "tools.js",
  "tools_dialog.js", "trusted.js", "turn.js",
];
const shell = new Set(kShell.map((name) => new URL(name, self.registration.scope).href));

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(kCache).then((cache) => cache.addAll([...shell])).then(() => self.skipWaiting()));
});

self.addEventListener("activate", (event) => {
  event.waitUntil(self.clients.claim());
});

async function freshOrKept(request) {
  const cache = await caches.open(kCache);
  try {
    const response = await fetch(request);
    if (response.ok) await cache.put(request.url, response.clone());
    return response;
  } catch (error) {
    const kept = await cache.match(request.url);
    if (kept) return kept;
    throw error;
  }
}

self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method === "GET" && shell.has(request.url.split(/[?#]/)[0]) && !request.url.includes("?")) event.respondWith(freshOrKept(request));
});
