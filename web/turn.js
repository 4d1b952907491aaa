// One answer: the request that asks for it and the message that grows out of the stream.
import { streamChat } from "./api.js";
import { requestOptions } from "./settings.js";

export const newAnswer = () => ({ role: "assistant", content: "", reasoning: "", toolCalls: [] });

// A message as the API wants it. Thoughts go back only beside tool calls: there the model needs them to go on.
function toApi(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.toolCallId, content: message.content };
  if (message.role === "user" || !message.toolCalls.length) return { role: message.role, content: message.content };
  return {
    role: "assistant",
    content: message.content,
    ...(message.reasoning && { reasoning_content: message.reasoning }),
    tool_calls: message.toolCalls.map(({ id, name, arguments: args }) => ({ id, type: "function", function: { name, arguments: args } })),
  };
}

export function requestBody(conversation, model, settings) {
  const isSaid = (message) => message.role !== "assistant" || message.content || message.toolCalls.length; // not a failed one
  const messages = conversation.messages.filter(isSaid).map(toApi);
  if (conversation.system) messages.unshift({ role: "system", content: conversation.system });
  return { model, messages, ...requestOptions(settings) };
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

// Fills `message` from the stream and calls changed() after each chunk. Throws ApiError; an abort ends it quietly.
export async function writeAnswer(body, message, signal, changed) {
  const clock = new Clock(message);
  try {
    for await (const chunk of streamChat(body, signal)) {
      const choice = chunk.choices?.[0];
      const delta = choice?.delta ?? {};
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
