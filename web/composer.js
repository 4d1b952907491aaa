// The box to write in: the message, the files that go with it (chosen, dropped or pasted), and how much of the model's
// context all of it takes.
import { postJson } from "./api.js";
import { readAttachment } from "./attachments.js";
import { number } from "./chart.js";
import { byId, el, iconButton, toast } from "./dom.js";
import { fileChip } from "./message_view.js";

const kCountMs = 400; // after the last change
const kWorthCounting = 2000; // characters without a file: below, nobody asks

export class Composer {
  // page: { send(text, attachments), requestFor(message) -> a body to count the tokens of, busy() }
  constructor(page) {
    this.page = page;
    this.prompt = byId("prompt");
    this.files = [];
    this.reading = 0;
    this.bindText();
    this.bindFiles();
  }

  bindText() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("input", () => {
      this.grow();
      this.countSoon();
    });
    this.prompt.addEventListener("keydown", (event) => {
      const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches;
      if (!sends) return;
      event.preventDefault();
      this.send();
    });
  }

  bindFiles() {
    const input = byId("attach-file");
    byId("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", () => {
      this.attach([...input.files]);
      input.value = "";
    });
    this.prompt.addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (!files.length) return;
      event.preventDefault();
      this.attach(files);
    });
    const stage = document.body;
    const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
    stage.addEventListener("dragover", (event) => {
      if (!carriesFiles(event)) return;
      event.preventDefault();
      stage.classList.add("dropping");
    });
    stage.addEventListener("dragleave", (event) => event.relatedTarget || stage.classList.remove("dropping"));
    stage.addEventListener("drop", (event) => {
      stage.classList.remove("dropping");
      if (!carriesFiles(event)) return;
      event.preventDefault();
      this.attach([...event.dataTransfer.files]);
    });
  }

  grow() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${Math.min(this.prompt.scrollHeight, innerHeight * 0.4)}px`;
  }

  clear() {
    this.prompt.value = "";
    this.files = [];
    this.showFiles();
    this.grow();
  }

  send() {
    const text = this.prompt.value.trim();
    if ((!text && !this.files.length) || this.reading || this.page.busy()) return;
    const { files } = this;
    this.clear();
    this.page.send(text, files);
  }

  async attach(files) {
    for (const file of files) {
      this.reading++;
      this.showFiles();
      try {
        const read = await readAttachment(file);
        this.files.push(read);
        if (read.empty) toast(`${file.name}: ${read.empty} of its ${read.pages} pages have no text, only pictures.`);
      } catch (error) {
        toast(error.message);
      }
      this.reading--;
      this.showFiles();
    }
    this.prompt.focus();
  }

  showFiles() {
    const chips = this.files.map((file, i) => {
      const remove = iconButton("close", `Remove ${file.name}`, () => {
        this.files.splice(i, 1);
        this.showFiles();
        this.prompt.focus();
      });
      return el("li", {}, fileChip(file, remove));
    });
    if (this.reading) chips.push(el("li", { class: "mild" }, "Reading…"));
    byId("attachments").replaceChildren(...chips);
    byId("attachments").hidden = !chips.length;
    this.countSoon();
  }

  countSoon() {
    clearTimeout(this.timer);
    const worth = this.files.length || this.prompt.value.length > kWorthCounting;
    byId("meter").hidden = !worth;
    if (worth) this.timer = setTimeout(() => this.count(), kCountMs);
  }

  // Asks the server what the whole request would be, in its model's own tokens.
  async count() {
    this.counting?.abort();
    this.counting = new AbortController();
    const message = { role: "user", content: this.prompt.value.trim(), attachments: this.files };
    try {
      const { count, max_model_len: most } = await postJson("/tokenize", this.page.requestFor(message), this.counting.signal);
      this.showCount(count, most);
    } catch (error) {
      if (error.name !== "AbortError") this.showCount(null, null, error.message);
    }
  }

  showCount(count, most, problem = "") {
    const meter = byId("meter");
    const over = count > most;
    meter.classList.toggle("over", over || problem !== "");
    const bar = el("progress", { max: most ?? 1, value: Math.min(count ?? 0, most ?? 1), "aria-label": "Part of the context that is used" });
    const text = problem || `${number(count)} of ${number(most)} tokens${over ? ": more than the model can read" : ""}`;
    meter.replaceChildren(...(problem ? [] : [bar]), el("span", {}, text));
  }
}
