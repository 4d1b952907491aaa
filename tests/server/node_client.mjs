// The official Node client against a running server: node node_client.mjs URL. Prints one line per check; status 1 when
// one fails. server_test.py installs the package and runs it.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "smollm2";
const messages = [{ role: "user", content: "Name a colour." }];
const chat = (options) => client.chat.completions.create({ model, messages, ...options });

const schema = {
  type: "object", additionalProperties: false, required: ["name", "age"],
  properties: { name: { type: "string", maxLength: 12 }, age: { type: "integer", minimum: 0, maximum: 120 } },
};
const parameters = {
  type: "object", additionalProperties: false, required: ["city"], properties: { city: { type: "string", maxLength: 20 } },
};
const tool = { type: "function", function: { name: "get_weather", description: "The weather of a city.", strict: true, parameters } };

const checks = {
  async models() {
    assert.equal((await client.models.list()).data[0].id, model);
    assert.equal((await client.models.retrieve(model)).object, "model");
  },
  async chat() {
    const done = await chat({ max_completion_tokens: 8, temperature: 0 });
    assert.ok(done.choices[0].message.content.length > 0);
    assert.equal(done.usage.completion_tokens, 8);
  },
  async stream() {
    const options = { max_tokens: 8, temperature: 0 };
    const whole = await chat(options);
    let text = "", usage = null;
    for await (const chunk of await chat({ ...options, stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, 8);
  },
  async streamHelper() {
    const deltas = [];
    const runner = client.chat.completions.stream({ model, messages, max_tokens: 8, temperature: 0 });
    runner.on("content", (delta) => deltas.push(delta));
    const { content } = await runner.finalMessage();
    assert.equal(deltas.join(""), content);
    assert.ok(deltas.length > 1);
  },
  async samplesSeedStopBiasPenalties() {
    const options = { n: 2, seed: 5, max_tokens: 8, temperature: 1.5, presence_penalty: 0.5, frequency_penalty: 0.5 };
    const texts = async () => (await chat(options)).choices.map((choice) => choice.message.content);
    const first = await texts();
    assert.deepEqual(first, await texts());
    assert.notEqual(first[0], first[1]);
    const whole = (await chat({ max_tokens: 20, temperature: 0 })).choices[0].message.content;
    const stopped = (await chat({ max_tokens: 20, temperature: 0, stop: whole.slice(8, 12) })).choices[0];
    assert.equal(stopped.message.content, whole.slice(0, whole.indexOf(whole.slice(8, 12))));
    assert.equal(stopped.finish_reason, "stop");
    const { tokens } = await client.post("/../tokenize", { body: { content: " yes", add_special: false } });
    const biased = await chat({ max_tokens: 3, temperature: 0, logit_bias: { [tokens[0]]: 100 } });
    assert.equal(biased.choices[0].message.content, " yes yes yes");
  },
  async logprobs() {
    const { content } = (await chat({ max_tokens: 4, temperature: 0, logprobs: true, top_logprobs: 2 })).choices[0].logprobs;
    assert.equal(content.length, 4);
    for (const item of content) assert.equal(item.token, item.top_logprobs[0].token);
  },
  async structuredOutput() {
    const response_format = { type: "json_schema", json_schema: { name: "person", strict: true, schema } };
    const { parsed } = (await client.chat.completions.parse({ model, messages, max_tokens: 200, temperature: 0, response_format }))
      .choices[0].message;
    assert.deepEqual(Object.keys(parsed), ["name", "age"]);
    const any = await chat({ max_tokens: 300, temperature: 0, response_format: { type: "json_object" } });
    if (any.choices[0].finish_reason === "stop") assert.equal(typeof JSON.parse(any.choices[0].message.content), "object");
  },
  async tools() {
    const options = { tools: [tool], tool_choice: "required", max_tokens: 200, temperature: 0, parallel_tool_calls: false };
    const { message, finish_reason } = (await chat(options)).choices[0];
    const [call] = message.tool_calls;
    assert.equal(finish_reason, "tool_calls");
    assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
    const streamed = (await client.chat.completions.stream({ model, messages, ...options }).finalMessage()).tool_calls[0];
    assert.deepEqual([streamed.function.name, streamed.function.arguments], [call.function.name, call.function.arguments]);
    const history = [...messages, message, { role: "tool", tool_call_id: call.id, content: "sunny" }];
    assert.ok((await chat({ messages: history, tools: [tool], max_tokens: 4 })).choices[0].message.role === "assistant");
    const none = await chat({ tools: [tool], tool_choice: "none", max_tokens: 8, temperature: 0 });
    assert.equal(none.choices[0].message.tool_calls, undefined);
  },
  async completions() {
    const options = { model, prompt: "One two three", max_tokens: 4, temperature: 0 };
    const whole = (await client.completions.create(options)).choices[0].text;
    let text = "";
    for await (const chunk of await client.completions.create({ ...options, stream: true })) text += chunk.choices[0].text;
    assert.equal(text, whole);
    const held = await client.completions.create({ ...options, max_tokens: 20, regex: "[0-9]{3}" });
    assert.match(held.choices[0].text, /^[0-9]{3}$/);
  },
  async embeddings() {
    const { data } = await client.embeddings.create({ model, input: ["a mill", "a law"] });
    assert.equal(data.length, 2);
    const length = data[0].embedding.reduce((sum, x) => sum + x * x, 0);
    assert.ok(Math.abs(length - 1) < 1e-4);
  },
  async abort() {
    for await (const _ of await chat({ max_tokens: 1500, ignore_eos: true, stream: true })) break; // closes the connection
  },
  async responses() {
    const options = { model, input: "Say hello.", max_output_tokens: 8, temperature: 0 };
    const done = await client.responses.create(options);
    assert.ok(done.output_text.length > 0);
    let text = "";
    for await (const event of client.responses.stream(options)) if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(text, done.output_text);
    assert.equal((await client.responses.retrieve(done.id)).status, "incomplete");
    const next = await client.responses.create({ ...options, input: "And again.", previous_response_id: done.id });
    assert.ok(next.usage.input_tokens > done.usage.input_tokens);
    assert.equal((await client.responses.inputItems.list(done.id)).data[0].content[0].text, "Say hello.");
    await client.responses.delete(done.id);
    await assert.rejects(client.responses.retrieve(done.id), OpenAI.NotFoundError);
  },
  async responsesTools() {
    const options = { model, temperature: 0, parallel_tool_calls: false, tools: [{ type: "function", ...tool.function }] };
    const asked = await client.responses.create({ ...options, input: "Weather in Oslo?", tool_choice: "required" });
    const call = asked.output.find((item) => item.type === "function_call");
    assert.deepEqual(Object.keys(JSON.parse(call.arguments)), ["city"]);
    const input = [{ type: "function_call_output", call_id: call.call_id, output: "rain" }];
    const answered = await client.responses.create({ ...options, input, previous_response_id: asked.id, max_output_tokens: 4 });
    assert.ok(answered.usage.input_tokens > asked.usage.input_tokens);
  },
  async responsesCancel() {
    const running = await client.responses.create({ model, input: "A long story.", background: true, ignore_eos: true });
    assert.equal(running.status, "in_progress");
    assert.equal((await client.responses.cancel(running.id)).status, "cancelled");
  },
  async errors() {
    await assert.rejects(chat({ temperature: 9 }), (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
    await assert.rejects(chat({ model: "another" }), OpenAI.NotFoundError);
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok ${name}`);
  } catch (error) {
    failed = 1;
    console.log(`FAILED ${name}: ${error.stack}`);
  }
}
console.log(failed ? "some failed" : `all ${Object.keys(checks).length} held`);
process.exit(failed);
