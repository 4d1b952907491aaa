// Light, dark, or as the system says. Loaded before the page is drawn, so that no wrong colour flashes.
// A classic script on purpose: modules run too late for that.
(() => {
  const kThemes = ["auto", "light", "dark"];
  const kLabels = { auto: "as the system says", light: "light", dark: "dark" };
  const root = document.documentElement;

  function saved() {
    try {
      const theme = localStorage.getItem("millrace.theme");
      return kThemes.includes(theme) ? theme : "auto";
    } catch {
      return "auto"; // storage is switched off
    }
  }

  function show(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (!button) return;
    button.setAttribute("aria-label", `Theme: ${kLabels[theme]}`);
    button.title = `Theme: ${kLabels[theme]}`;
  }

  show(saved());
  document.addEventListener("DOMContentLoaded", () => {
    show(saved());
    document.getElementById("theme").addEventListener("click", () => {
      const next = kThemes[(kThemes.indexOf(root.dataset.theme) + 1) % kThemes.length];
      try {
        localStorage.setItem("millrace.theme", next);
      } catch {
        // It holds until the page is left.
      }
      show(next);
    });
  });
  addEventListener("storage", (event) => event.key === "millrace.theme" && show(saved()));
})();
