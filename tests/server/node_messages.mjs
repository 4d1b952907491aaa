// Anthropic's Node client against a running server: node node_messages.mjs URL. Prints one line per check; status 1 when
// one fails. messages.py installs the package and runs it.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const fields = { model: "smollm2", max_tokens: 12, messages: [{ role: "user", content: "Name a colour." }], temperature: 0 };
const tool = {
  name: "get_weather", description: "The weather of a city.", strict: true,
  input_schema: {
    type: "object", additionalProperties: false, required: ["city"], properties: { city: { type: "string", maxLength: 20 } },
  },
};

const checks = {
  async message() {
    const message = await client.messages.create(fields);
    assert.equal(message.role, "assistant");
    assert.ok(message.content[0].text.length > 0);
    assert.ok(message.usage.output_tokens <= 12);
  },
  async events() {
    const whole = await client.messages.create(fields);
    const pieces = [];
    const stream = client.messages.stream(fields).on("text", (text) => pieces.push(text));
    const final = await stream.finalMessage();
    assert.equal(pieces.join(""), whole.content[0].text);
    assert.equal(final.content[0].text, whole.content[0].text);
    assert.equal(final.stop_reason, whole.stop_reason);
  },
  async tools() {
    const asked = {
      ...fields, max_tokens: 200, tools: [tool], tool_choice: { type: "tool", name: "get_weather", disable_parallel_tool_use: true },
    };
    const stream = client.messages.stream(asked);
    const final = await stream.finalMessage();
    const call = final.content.at(-1);
    assert.equal(call.type, "tool_use");
    assert.deepEqual(Object.keys(call.input), ["city"]);
    assert.equal(final.stop_reason, "tool_use");
    const history = [
      ...fields.messages, { role: "assistant", content: final.content },
      { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "sunny" }] },
    ];
    const after = await client.messages.create({ ...fields, tools: [tool], messages: history });
    assert.equal(after.type, "message");
  },
  async countTokens() {
    const { input_tokens } = await client.messages.countTokens({ model: fields.model, messages: fields.messages });
    const { usage } = await client.messages.create(fields);
    assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
  },
  async errors() {
    const long = { ...fields, messages: [{ role: "user", content: "word ".repeat(3000) }] };
    await assert.rejects(client.messages.create(long), (error) =>
      error instanceof Anthropic.BadRequestError && /prompt is too long: \d+ tokens > 2048 maximum/.test(error.message) &&
      error.requestID.length > 0);
    await assert.rejects(client.messages.create({ ...fields, model: "claude-of-tomorrow" }), Anthropic.NotFoundError);
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`${name}: held`);
  } catch (error) {
    failed += 1;
    console.log(`${name}: ${error.stack}`);
  }
}
console.log(failed === 0 ? `all ${Object.keys(checks).length} held` : `${failed} failed`);
process.exit(failed === 0 ? 0 : 1);
