// The official Node client against a running server: node node_client.mjs URL. Prints one line per check; status 1 when
// one fails. server_test.py installs the package and runs it.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "smollm2";
const messages = [{ role: "user", content: "Name a colour." }];

const checks = {
  async models() {
    assert.equal((await client.models.list()).data[0].id, model);
  },
  async chat() {
    const done = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0 });
    assert.ok(done.choices[0].message.content.length > 0);
    assert.equal(done.usage.completion_tokens, 8);
  },
  async stream() {
    const options = { model, messages, max_tokens: 8, temperature: 0 };
    const whole = await client.chat.completions.create(options);
    const stream = await client.chat.completions.create({ ...options, stream: true, stream_options: { include_usage: true } });
    let text = "", usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, 8);
  },
  async abort() {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 1500, ignore_eos: true, stream: true });
    for await (const _ of stream) break; // leaving the loop closes the connection
  },
  async responses() {
    const done = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 8, temperature: 0 });
    assert.ok(done.output_text.length > 0);
    const stream = client.responses.stream({ model, input: "Say hello.", max_output_tokens: 8, temperature: 0 });
    let text = "";
    for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(text, done.output_text);
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }),
      (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
    await assert.rejects(client.chat.completions.create({ model: "another", messages }), OpenAI.NotFoundError);
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
process.exit(failed);
