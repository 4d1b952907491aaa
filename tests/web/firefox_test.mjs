// The page in Firefox: an answer that streams and is stopped, formulas, colours, files and PDFs, branches, tool servers from
// the worker, and axe, over WebDriver BiDi. What differs between browsers is here; the rest is Chromium's (web_test.py).
//   node firefox_test.mjs NODE_MODULES FIREFOX SERVER_URL TOOL_SERVER_URL PDF
import assert from "node:assert";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const [modules, firefox, url, toolServer, pdf] = process.argv.slice(2);
const require = createRequire(`${modules}/`);
const puppeteer = require("puppeteer-core");
const kPatience = 120000; // ms, for machines that are busy or stalled

const browser = await puppeteer.launch({ browser: "firefox", executablePath: firefox, headless: true, timeout: kPatience });
const page = await browser.newPage();
const complaints = [];
page.on("console", (message) => ["error", "warn"].includes(message.type()) && complaints.push(message.text()));
page.on("pageerror", (error) => complaints.push(String(error)));

// Puppeteer's own waiting makes functions out of strings, which the page's policy forbids.
async function until(what, ask, ...args) {
  const end = Date.now() + kPatience;
  while (Date.now() < end) {
    const found = await page.evaluate(ask, ...args);
    if (found) return found;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  throw new Error(`${what}: waited in vain. ${await page.evaluate(() => document.body.innerText)}`);
}

const done = () => until("the answer", () => document.querySelector("#stop").hidden && document.querySelector(".assistant:last-child[aria-busy=false]") !== null);
const text = (selector) => page.evaluate((one) => [...document.querySelectorAll(one)].map((node) => node.innerText), selector);
const click = (selector) => page.evaluate((one) => document.querySelector(one).click(), selector);

async function send(words) {
  await page.focus("#prompt");
  await page.keyboard.type(words);
  await page.keyboard.press("Enter");
}

try {
  await page.setViewport({ width: 1280, height: 860 });
  await page.goto(`${url}/icon.svg`);
  await page.evaluate(() => localStorage.setItem("millrace.settings", JSON.stringify({ temperature: 0, max_tokens: 12 })));
  await page.goto(url);
  await until("the model", () => document.querySelector("#model").textContent.includes("SmolLM2"));

  // An answer, another beside it, and back.
  await send("Count from one to twenty in words.");
  await done();
  const [first] = await text(".assistant > .prose");
  assert.ok(first.length > 0);
  assert.match((await text(".speed"))[0], /tokens/);
  await click("[aria-label='Answer again']");
  await until("a branch", () => document.querySelector(".assistant .branches")?.innerText.includes("2/2"));
  await done();
  assert.equal((await text(".assistant > .prose"))[0], first);
  await click(".assistant [aria-label='Previous version']");
  await until("the first branch", () => document.querySelector(".assistant .branches").innerText.includes("1/2"));
  await click(".assistant [aria-label='Continue the answer']");
  await until("more of it", (length) => document.querySelector(".assistant > .prose").innerText.length > length, first.length);
  await done();
  assert.ok((await text(".assistant > .prose"))[0].startsWith(first));

  // Formulas and code.
  const drawn = await page.evaluate(async () => {
    const { markdown } = await import("/markdown.js");
    const root = document.querySelector(".assistant > .prose");
    root.append(...markdown("$$x = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}$$\n\n```js\nconst a = 1; // b\n```"));
    const height = (selector) => root.querySelector(selector).getBoundingClientRect().height;
    return { whole: height("mfrac"), below: height("mfrac > :last-child"), colour: getComputedStyle(root.querySelector(".tok-keyword")).color,
      plain: getComputedStyle(root).color };
  });
  assert.ok(drawn.whole > 1.8 * drawn.below, JSON.stringify(drawn));
  assert.notEqual(drawn.colour, drawn.plain);

  // A PDF.
  const bytes = [...readFileSync(pdf)];
  await page.evaluate((data) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([new Uint8Array(data)], "mill.pdf", { type: "application/pdf" }));
    document.querySelector("#scroll").dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
  }, bytes);
  await until("the PDF", () => document.querySelector("#attachments .chip")?.innerText.includes("3 pages"));
  await until("the count", () => /of 4,096 tokens|of [\d,]+ tokens/.test(document.querySelector("#meter").innerText));
  await click("[aria-label='Remove mill.pdf']");

  // A tool server, spoken to by the worker; the page itself may not.
  if (toolServer) {
    await click("#open-tools");
    await page.focus("#tools-form [name=url]");
    await page.keyboard.type(toolServer);
    await page.keyboard.press("Enter");
    await until("the tools", () => document.querySelectorAll("#tool-servers li").length === 4);
    const result = await page.evaluate(async () => {
      const { findTool, runTool } = await import("/tools.js");
      return runTool(findTool("add"), '{"a": 40, "b": 2}');
    });
    assert.deepEqual(result, { content: "42", isError: false });
    await page.keyboard.press("Escape");
    assert.equal(await page.evaluate((address) => fetch(address).then(() => "reached", () => "refused"), toolServer), "refused");
  }

  // It is kept, and axe has nothing to say, in either theme.
  await until("the service worker", () => navigator.serviceWorker.ready.then(() => true));
  const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
  for (const [path, ready] of [["/", ".assistant"], ["/dashboard.html", "#tiles .value"]]) {
    await page.goto(url + path);
    await until(path, (selector) => document.querySelector(selector) !== null, ready);
    for (const theme of ["light", "dark"]) {
      await page.evaluate((name) => (document.documentElement.dataset.theme = name), theme);
      await page.evaluate(`${axe}; undefined`);
      const found = await page.evaluate(async () => {
        await Promise.all(document.getAnimations().filter((a) => a.effect.getComputedTiming().endTime < Infinity).map((a) => a.finished.catch(() => {})));
        return (await axe.run()).violations.map(({ id, nodes }) => `${id}: ${nodes[0].html}`);
      });
      assert.deepEqual(found, [], `${path} ${theme}`);
    }
  }
  const expected = /Content-Security-Policy/; // the refusal above
  assert.deepEqual(complaints.filter((line) => !expected.test(line)), []);
  console.log(`${await browser.version()}: all is well`);
} finally {
  await browser.close();
}
