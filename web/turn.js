// One answer: the request that asks for it and the message that grows out of the stream.
import { postJson, streamAnswer } from "./api.js";
import { contentParts } from "./attachments.js";
import { requestOptions } from "./settings.js";

export const newAnswer = () => ({ role: "assistant", content: "", reasoning: "", toolCalls: [] });

const kNotRun = "The call was not carried out.";

// A message as the API wants it, with the results of its calls behind it. Thoughts go back only beside tool calls:
// there the model needs them to go on.
function toApi(message) {
  if (message.role === "user") return [{ role: "user", content: contentParts(message) }];
  if (!message.toolCalls.length) return [{ role: "assistant", content: message.content }];
  const calls = message.toolCalls.map(({ id, name, arguments: args }) => ({ id, type: "function", function: { name, arguments: args } }));
  const asked = { role: "assistant", content: message.content, ...(message.reasoning && { reasoning_content: message.reasoning }), tool_calls: calls };
  return [asked, ...message.toolCalls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result?.content ?? kNotRun }))];
}

export function apiMessages(path, system) {
  const isSaid = (message) => message.role !== "assistant" || message.content || message.toolCalls.length; // not a failed one
  return [...(system ? [{ role: "system", content: system }] : []), ...path.filter(isSaid).flatMap(toApi)];
}

// path: the messages to answer; tools: definitions besides those of the settings.
export function requestBody(path, conversation, model, tools = []) {
  const options = requestOptions(conversation.settings ?? {});
  const offered = [...(options.tools ?? []), ...tools];
  if (offered.length) options.tools = offered;
  return { model, messages: apiMessages(path, conversation.system), ...options };
}

function addToolCalls(calls, deltas) {
  for (const delta of deltas) {
    const call = (calls[delta.index ?? calls.length] ??= { id: "", name: "", arguments: "" });
    if (delta.id) call.id = delta.id;
    call.name += delta.function?.name ?? "";
    call.arguments += delta.function?.arguments ?? "";
  }
}

// Times as this browser sees them; the number of tokens is the server's own as soon as it says it.
class Clock {
  constructor(message) {
    this.begin = performance.now();
    this.message = message;
    this.pieces = 0; // until the usage comes, about one token each
    message.stats = {};
  }

  // A piece of text, thought or call has come.
  tick() {
    const { stats } = this.message;
    const now = (performance.now() - this.begin) / 1000;
    stats.first ??= now;
    this.last = now;
    this.rate(++this.pieces);
    if (this.message.reasoning && !this.message.content && !this.message.toolCalls.length) stats.thinking = now;
  }

  rate(tokens) {
    const { stats } = this.message;
    if (tokens > 1 && this.last > stats.first) stats.rate = (tokens - 1) / (this.last - stats.first);
  }

  usage(usage) {
    const { stats } = this.message;
    stats.tokens = usage.completion_tokens;
    stats.prompt = usage.prompt_tokens;
    stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    stats.exact = true;
    this.rate(stats.tokens);
  }
}

async function fill(message, chunks, changed) {
  const clock = new Clock(message);
  try {
    for await (const chunk of chunks) {
      const choice = chunk.choices?.[0];
      const delta = choice?.delta ?? { content: choice?.text }; // of a chat, or of a completion
      const thought = delta.reasoning_content ?? "";
      message.content += delta.content ?? "";
      message.reasoning += thought;
      addToolCalls(message.toolCalls, delta.tool_calls ?? []);
      if (delta.content || thought || delta.tool_calls) clock.tick();
      if (choice?.finish_reason) message.finish = choice.finish_reason;
      if (chunk.usage) clock.usage(chunk.usage);
      changed();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    message.finish = "stopped";
  }
}

// Fills `message` from the stream and calls changed() after each chunk. Throws ApiError; an abort ends it quietly.
export function writeAnswer(body, message, signal, changed) {
  return fill(message, streamAnswer("/v1/chat/completions", body, signal), changed);
}

// The tokens of a prompt that ends where the answer `message` has come to. The template is applied twice with answers
// that differ from their first character on: what both have in common comes before the answer.
async function promptBefore(body, message, signal) {
  const { model, messages, tools } = body;
  const rendered = ["0", "="].map((content) => {
    const answer = { role: "assistant", content, ...(message.reasoning && { reasoning_content: message.reasoning }) };
    return postJson("/apply-template", { model, messages: [...messages, answer], ...(tools && { tools }) }, signal);
  });
  const [one, other] = (await Promise.all(rendered)).map(({ tokens }) => tokens);
  return one.slice(0, one.findIndex((token, i) => token !== other[i]));
}

const kChatOnly = ["messages", "tools", "tool_choice", "response_format", "reasoning_effort", "max_completion_tokens"];

// Goes on with an answer that was cut off: a completion of the chat's prompt and what has been said so far.
export async function continueAnswer(body, message, signal, changed) {
  const options = Object.fromEntries(Object.entries(body).filter(([name]) => !kChatOnly.includes(name)));
  if (body.max_completion_tokens) options.max_tokens = body.max_completion_tokens;
  const said = { model: body.model, content: message.content, add_special: false, parse_special: false };
  async function* chunks() {
    const [before, { tokens, max_model_len }] = await Promise.all([promptBefore(body, message, signal), postJson("/tokenize", said, signal)]);
    const prompt = [...before, ...tokens];
    yield* streamAnswer("/v1/completions", { max_tokens: Math.max(max_model_len - prompt.length, 1), ...options, prompt }, signal);
  }
  delete message.finish;
  delete message.error;
  return fill(message, chunks(), changed);
}
