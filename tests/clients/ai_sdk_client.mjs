// Vercel's AI SDK with its provider for servers like OpenAI's: text, streams, objects, tools, embeddings, errors.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { base, model, question, run } from "./checks.mjs";

const provider = createOpenAICompatible({ name: "millrace", baseURL: base, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
const common = { model: provider(model), temperature: 0, maxRetries: 0 };
const city = z.object({ name: z.string(), country: z.string(), population: z.number(), tags: z.array(z.string()) });
const weather = tool({
  description: "The weather of a city.", inputSchema: z.object({ city: z.string() }),
  execute: async ({ city: where }) => `It is sunny in ${where.slice(0, 20)}.`,
});

await run("ai", {
  async text() {
    const { text, usage } = await generateText({ ...common, prompt: question, maxOutputTokens: 12 });
    assert.ok(text.length > 0);
    assert.equal(usage.outputTokens, 12);
  },
  async streamedText() {
    const whole = await generateText({ ...common, prompt: question, maxOutputTokens: 12 });
    const stream = streamText({ ...common, prompt: question, maxOutputTokens: 12 });
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, whole.text);
    assert.equal((await stream.usage).outputTokens, 12);
    assert.equal(await stream.finishReason, "length");
  },
  async objects() {
    const { object } = await generateObject({ ...common, schema: city, prompt: "Tell me of Paris.", maxOutputTokens: 1500 });
    city.parse(object);
    const { output } = await generateText({ ...common, output: Output.object({ schema: city }), prompt: "Paris?", maxOutputTokens: 1500 });
    city.parse(output);
  },
  async streamedObjects() {
    const stream = streamObject({ ...common, schema: city, prompt: "Tell me of Paris.", maxOutputTokens: 1500 });
    let pieces = 0;
    for await (const partial of stream.partialObjectStream) pieces += partial ? 1 : 0;
    assert.ok(pieces > 3);
    city.parse(await stream.object);
  },
  async namedAndRequiredTools() {
    for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
      const { toolCalls, toolResults } = await generateText({ ...common, tools: { weather }, toolChoice, prompt: "Weather in Oslo?", maxOutputTokens: 1500 });
      assert.equal(toolCalls[0].toolName, "weather");
      assert.match(toolResults[0].output, /sunny/);
      if (toolChoice !== "required") assert.equal(toolCalls.length, 1);
    }
  },
  async severalSteps() {
    const stream = streamText({
      ...common, tools: { weather }, prompt: "Weather in Oslo?", maxOutputTokens: 300, stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "none" }),
    });
    await stream.consumeStream();
    const steps = await stream.steps;
    assert.deepEqual(steps.map((step) => step.toolCalls.length), [1, 0]);
    assert.ok(steps[1].text.length > 0);
  },
  async embeddings() {
    const { embeddings } = await embedMany({ model: provider.textEmbeddingModel(model), values: ["a", "b"], maxRetries: 0 });
    assert.deepEqual(embeddings.map((e) => e.length), [576, 576]);
  },
  async errors() {
    await assert.rejects(generateText({ ...common, model: provider("another"), prompt: question }),
      (error) => APICallError.isInstance(error) && error.statusCode === 404);
  },
});
