// Messages and whole chats as Markdown, for the clipboard.
import { fenceFor, withAttachments } from "./attachments.js";

function fenced(text, language) {
  const fence = fenceFor(text);
  return `${fence}${language}\n${text}\n${fence}`;
}

function callMarkdown({ name, arguments: args, result }) {
  const parts = [`**Call of \`${name}\`**`, fenced(args || "{}", "json")];
  if (result) parts.push(`**${result.isError ? "Error" : "Result"}**`, fenced(result.content, ""));
  return parts.join("\n\n");
}

// What a message says, without what was thought.
export function messageMarkdown(message) {
  if (message.role === "user") return withAttachments(message);
  return [message.content.trim(), ...message.toolCalls.map(callMarkdown)].filter(Boolean).join("\n\n");
}

const kSpeakers = { user: "You", assistant: "Assistant" };

// The path that is shown; an answer that goes on after tool calls is one answer.
export function conversationMarkdown(conversation, path) {
  const parts = [`# ${conversation.title}`];
  if (conversation.system) parts.push(`> ${conversation.system.replaceAll("\n", "\n> ")}`);
  path.forEach((message, i) => {
    if (message.role !== path[i - 1]?.role) parts.push(`## ${kSpeakers[message.role]}`);
    const text = messageMarkdown(message);
    if (text) parts.push(text);
  });
  return `${parts.join("\n\n")}\n`;
}
