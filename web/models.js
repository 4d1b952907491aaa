// The model picker: what GET /v1/models lists, and which of them each conversation asks.
import { getJson } from "./api.js";
import { byId, el } from "./dom.js";

const kLast = "millrace.model"; // the choice that new chats begin with
const kRetryMs = 3000;
const kStates = { loaded: "loaded", loading: "loading…", unloaded: "not loaded", unloading: "not loaded" };

// What is said of a model beside its name; a server of one model says nothing.
function stateOf({ meta }) {
  if (meta?.error) return "could not be loaded";
  return kStates[meta?.state] ?? (typeof meta?.loaded === "boolean" ? kStates[meta.loaded ? "loaded" : "unloaded"] : "");
}

export class ModelPicker {
  // needsKey(again): called when the server wants a key; onChoose(id): when the reader has chosen.
  constructor({ needsKey, onChoose }) {
    this.select = byId("model");
    this.models = [];
    this.wanted = localStorage.getItem(kLast) ?? "";
    this.needsKey = needsKey;
    this.select.addEventListener("change", () => {
      this.wanted = this.select.value;
      localStorage.setItem(kLast, this.wanted);
      onChoose(this.wanted);
    });
  }

  async load() {
    try {
      this.models = (await getJson("/v1/models")).data;
      this.show();
    } catch (error) {
      this.models = [];
      this.select.replaceChildren(el("option", { value: "" }, error.status === 401 ? "Key needed" : "No server"));
      this.select.disabled = true;
      if (error.status === 401) this.needsKey(() => this.load());
      else setTimeout(() => this.load(), kRetryMs);
    }
  }

  // A model that a chat was held with and that is no longer here is not offered: the first one answers instead.
  show() {
    const several = this.models.length > 1;
    this.select.replaceChildren(...this.models.map((model) => {
      const state = several ? stateOf(model) : "";
      return el("option", { value: model.id }, state ? `${model.id} · ${state}` : model.id);
    }));
    this.select.disabled = !several;
    if (this.models.some(({ id }) => id === this.wanted)) this.select.value = this.wanted;
  }

  // Shows the model of the conversation that was opened, or the last choice.
  follow(id) {
    this.wanted = id || localStorage.getItem(kLast) || "";
    if (this.models.length) this.show();
  }

  // The model that will answer has to be loaded first.
  get isAsleep() {
    return this.models.find(({ id }) => id === this.value)?.meta?.loaded === false;
  }

  get value() {
    return this.select.value;
  }
}
