// Ollama's npm package against a running server: node ollama_client.mjs http://127.0.0.1:PORT
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const client = new Ollama({ host: process.argv[2] });
const messages = [{ role: "user", content: "Name a colour." }];
const options = { temperature: 0, num_predict: 8 };
let held = 0;

const { models } = await client.list();
assert(models.some((model) => model.name === "smollm2" && model.size > 1e6));
held++;

const whole = await client.chat({ model: "smollm2", messages, options });
assert(whole.done && whole.message.content.length > 0 && whole.eval_count > 0);
held++;

let text = "";
for await (const part of await client.chat({ model: "smollm2", messages, options, stream: true })) text += part.message.content;
assert.equal(text, whole.message.content);
held++;

await assert.rejects(client.generate({ model: "not-there", prompt: "x" }), /not-there/);
held++;

console.log(`all ${held} held`);
