// OpenAI's Agents SDK for JavaScript, over both APIs: runs with a tool, with a typed result, streamed.
import assert from "node:assert/strict";
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { base, model, question, run } from "./checks.mjs";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: base, apiKey: "none", maxRetries: 0 });
const models = [new OpenAIChatCompletionsModel(client, model), new OpenAIResponsesModel(client, model)];
const city = z.object({ name: z.string(), country: z.string(), population: z.number() });
const weather = tool({
  name: "weather", description: "The weather of a city.", parameters: z.object({ city: z.string() }),
  execute: async ({ city: where }) => `It is sunny in ${where.slice(0, 20)}.`,
});
const settings = (options) => ({ temperature: 0, maxTokens: 1500, ...options });
const runner = new Runner({ tracingDisabled: true });

await run("@openai/agents", {
  async plainRuns() {
    for (const one of models) {
      const result = await runner.run(new Agent({ name: "a", model: one, modelSettings: settings({ maxTokens: 24 }) }), question);
      assert.ok(result.finalOutput.length > 0);
    }
  },
  async typedResults() {
    for (const one of models) {
      const result = await runner.run(new Agent({ name: "a", model: one, outputType: city, modelSettings: settings() }), "Tell me of Paris.");
      city.parse(result.finalOutput);
    }
  },
  async aToolThenAnAnswer() {
    for (const one of models) {
      const agent = new Agent({ name: "a", model: one, tools: [weather], modelSettings: settings({ toolChoice: "weather", maxTokens: 300 }) });
      const result = await runner.run(agent, "Weather in Oslo?", { maxTurns: 3 });
      assert.equal(result.newItems.filter((item) => item.type === "tool_call_item").length, 1);
      assert.equal(typeof result.finalOutput, "string");
    }
  },
  async streamedRuns() {
    for (const one of models) {
      const agent = new Agent({ name: "a", model: one, tools: [weather], modelSettings: settings({ toolChoice: "required", maxTokens: 300 }) });
      const result = await runner.run(agent, "Weather in Oslo?", { maxTurns: 4, stream: true });
      const names = [];
      for await (const event of result) if (event.type === "run_item_stream_event") names.push(event.name);
      await result.completed;
      assert.ok(names.includes("tool_called") && names.includes("tool_output"), names.join());
    }
  },
});
