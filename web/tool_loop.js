// What happens to the tool calls of an answer: they run when the reader has allowed it, their results are kept with the
// calls, and when all have one the model is asked to go on.
import { allowAlways, findTool, isAlwaysAllowed, runTool } from "./tools.js";

const kMostRounds = 24; // answers that follow from one message without the reader

export class ToolLoop {
  // changed(conversation, message): something is to be shown and kept; goOn(conversation, message): all results are there.
  constructor({ changed, goOn }) {
    this.changed = changed;
    this.goOn = goOn;
    this.running = new Map(); // call -> AbortController
  }

  stateOf(message, call) {
    if (call.result) return "done";
    if (this.running.has(call)) return "running";
    return findTool(call.name) ? "asking" : "by hand";
  }

  isBusy(message) {
    return message?.toolCalls?.some((call) => this.running.has(call)) ?? false;
  }

  stop(message) {
    message?.toolCalls?.forEach((call) => this.running.get(call)?.abort());
  }

  // After an answer: calls that need no question run. rounds: how many answers came before this one since the reader spoke.
  begin(conversation, message, rounds) {
    if (rounds >= kMostRounds) return;
    for (const call of message.toolCalls) {
      const found = findTool(call.name);
      if (!call.result && found && isAlwaysAllowed(found)) this.run(conversation, message, call, found);
    }
  }

  allow(conversation, message, call, always) {
    const found = findTool(call.name);
    if (!found) return this.settle(conversation, message, call, { content: "This tool is no longer here.", isError: true });
    if (always) allowAlways(found);
    const same = message.toolCalls.filter((one) => one === call || (always && one.name === call.name && !one.result && !this.running.has(one)));
    return Promise.all(same.map((one) => this.run(conversation, message, one, found)));
  }

  refuse(conversation, message, call) {
    this.settle(conversation, message, call, { content: "The user refused this call.", isError: true });
  }

  // Results that the reader wrote.
  answer(conversation, message, results) {
    for (const [call, content] of results) call.result = { content, isError: false };
    this.finish(conversation, message);
  }

  async run(conversation, message, call, found) {
    const controller = new AbortController();
    this.running.set(call, controller);
    this.changed(conversation, message);
    const result = await runTool(found, call.arguments, controller.signal);
    this.running.delete(call);
    this.settle(conversation, message, call, result, controller.signal.aborted);
  }

  settle(conversation, message, call, result, stopped = false) {
    call.result = result;
    this.finish(conversation, message, stopped);
  }

  finish(conversation, message, stopped = false) {
    this.changed(conversation, message);
    if (!stopped && message.toolCalls.every((call) => call.result)) this.goOn(conversation, message);
  }
}
