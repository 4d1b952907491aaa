// What the scripts for Node packages share: the server's address, and a line for each check that held.
import { readFileSync } from "node:fs";

export const base = `${process.argv[2] ?? "http://127.0.0.1:8080"}/v1`;
export const model = "smollm2";
export const question = "Name a colour.";

export async function run(name, checks) {
  const { version } = JSON.parse(readFileSync(new URL(`./node_modules/${name}/package.json`, import.meta.url)));
  let failed = 0;
  for (const [label, check] of Object.entries(checks)) {
    const begin = Date.now();
    let said = "held";
    try {
      await check();
    } catch (error) {
      failed += 1;
      said = `FAILED: ${error.name}: ${error.message}`;
    }
    const words = label.replace(/[A-Z]/g, (letter) => ` ${letter.toLowerCase()}`);
    console.log(`${name} ${version}: ${words}: ${said} (${((Date.now() - begin) / 1000).toFixed(1)} s)`);
  }
  const total = Object.keys(checks).length;
  console.log(`${name} ${version}: ${total - failed} of ${total} held`);
  process.exit(failed ? 1 : 0);
}
