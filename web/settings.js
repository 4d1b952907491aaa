// The settings dialog: what a request says beyond its messages. An empty field is left out of the request, so that
// the server's own default holds.
import { apiKey, setApiKey } from "./api.js";
import { byId } from "./dom.js";
import { loadSettings, saveSettings } from "./store.js";

const kNumbers = ["temperature", "top_p", "max_tokens", "seed"];

// The part of a request's body that comes from the settings.
export function requestOptions(settings) {
  const options = {};
  for (const name of kNumbers) {
    if (Number.isFinite(settings[name])) options[name === "max_tokens" ? "max_completion_tokens" : name] = settings[name];
  }
  if (settings.reasoning_effort) options.reasoning_effort = settings.reasoning_effort;
  if (settings.tools) options.tools = JSON.parse(settings.tools); // checked when it was saved
  return options;
}

// Returns the settings in the form, or throws an Error that says which field is wrong and why.
function readForm(form) {
  const settings = { system: form.system.value.trim(), reasoning_effort: form.reasoning_effort.value };
  for (const name of kNumbers) {
    const field = form[name];
    if (!field.checkValidity()) throw new Error(`${field.labels[0].firstChild.data.trim()}: ${field.validationMessage}`);
    if (field.value !== "") settings[name] = field.valueAsNumber;
  }
  const tools = form.tools.value.trim();
  if (tools) {
    let parsed;
    try {
      parsed = JSON.parse(tools);
    } catch (error) {
      throw new Error(`Tools: ${error.message}`);
    }
    if (!Array.isArray(parsed)) throw new Error("Tools: expected a JSON list");
    settings.tools = tools;
  }
  return settings;
}

// onSave(settings) is called with what was saved; systemNow() gives the prompt of the conversation on the page.
export function bindSettings({ onSave, systemNow }) {
  const dialog = byId("settings");
  const form = byId("settings-form");
  const problem = form.querySelector(".problem");

  function fill(settings) {
    form.system.value = settings.system ?? "";
    form.tools.value = settings.tools ?? "";
    form.reasoning_effort.value = settings.reasoning_effort ?? "";
    for (const name of kNumbers) form[name].value = settings[name] ?? "";
    problem.hidden = true;
  }

  byId("open-settings").addEventListener("click", () => {
    fill({ ...loadSettings(), system: systemNow() });
    form.key.value = apiKey();
    form.querySelector("details").open = form.tools.value !== "";
    dialog.showModal();
  });
  byId("close-settings").addEventListener("click", () => dialog.close());
  byId("reset-settings").addEventListener("click", () => fill({}));
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // beside it
  form.addEventListener("submit", (event) => {
    try {
      const settings = readForm(form);
      saveSettings(settings);
      setApiKey(form.key.value.trim());
      onSave(settings);
    } catch (error) {
      event.preventDefault();
      problem.textContent = error.message;
      problem.hidden = false;
    }
  });
}
