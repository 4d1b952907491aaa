// The settings dialog: what a request says beyond its messages, for each chat. An empty field is left out of the request,
// so that the server's own default holds.
import { apiKey, setApiKey } from "./api.js";
import { bindDialog, byId } from "./dom.js";
import { saveSettings } from "./store.js";

const kNumbers = ["temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "max_tokens"];
const kTexts = ["system", "reasoning_effort", "stop", "format", "schema", "tools"];

// One to a line; \n and \t stand for what cannot be typed in one.
const stopsOf = (text) => text.split("\n").filter(Boolean).map((line) => line.replace(/\\n/g, "\n").replace(/\\t/g, "\t"));

function responseFormat({ format, schema }) {
  if (format === "json_object") return { type: "json_object" };
  if (format === "json_schema") return { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema), strict: true } };
  return null;
}

// The part of a request's body that comes from the settings.
export function requestOptions(settings) {
  const options = {};
  for (const name of kNumbers) {
    if (Number.isFinite(settings[name])) options[name === "max_tokens" ? "max_completion_tokens" : name] = settings[name];
  }
  if (settings.reasoning_effort) options.reasoning_effort = settings.reasoning_effort;
  if (settings.stop) options.stop = stopsOf(settings.stop);
  const format = responseFormat(settings);
  if (format) options.response_format = format;
  if (settings.tools) options.tools = JSON.parse(settings.tools); // checked when it was saved
  return options;
}

function parsed(text, label) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label}: ${error.message}`);
  }
}

// Returns the settings in the form, or throws an Error that says which field is wrong and why.
function readForm(form) {
  const settings = {};
  for (const name of kTexts) {
    const text = name === "stop" ? form[name].value : form[name].value.trim();
    if (text) settings[name] = text;
  }
  for (const name of kNumbers) {
    const field = form[name];
    if (!field.checkValidity()) throw new Error(`${field.labels[0].firstChild.data.trim()}: ${field.validationMessage}`);
    if (field.value !== "") settings[name] = field.valueAsNumber;
  }
  if (settings.tools && !Array.isArray(parsed(settings.tools, "Tools"))) throw new Error("Tools: expected a JSON list");
  if (settings.format === "json_schema") {
    const schema = parsed(settings.schema ?? "", "Schema");
    if (schema === null || typeof schema !== "object" || Array.isArray(schema)) throw new Error("Schema: expected a JSON object");
  }
  return settings;
}

// current() gives the settings of the chat that is open, its system prompt among them; onSave(settings) gets the new ones.
export function bindSettings({ current, onSave }) {
  const dialog = bindDialog(byId("settings"));
  const form = byId("settings-form");
  const problem = form.querySelector(".problem");
  const showSchema = () => (byId("schema-field").hidden = form.format.value !== "json_schema");

  function fill(settings) {
    for (const name of [...kTexts, ...kNumbers]) form[name].value = settings[name] ?? "";
    problem.hidden = true;
    showSchema();
  }

  byId("open-settings").addEventListener("click", () => {
    fill(current());
    form.key.value = apiKey();
    form.querySelector("details").open = form.tools.value !== "";
    dialog.showModal();
  });
  form.format.addEventListener("change", showSchema);
  byId("reset-settings").addEventListener("click", () => fill({}));
  form.addEventListener("submit", (event) => {
    try {
      const settings = readForm(form);
      if (form.everywhere.checked) saveSettings(settings);
      setApiKey(form.key.value.trim());
      onSave(settings);
    } catch (error) {
      event.preventDefault();
      problem.textContent = error.message;
      problem.hidden = false;
      problem.scrollIntoView({ block: "nearest" });
    }
  });
}
