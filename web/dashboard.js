// The dashboard: asks /stats once a second while somebody looks, and draws what it says (docs/server.md has the names).
import { getJson, setApiKey } from "./api.js";
import { bytes, duration, lineChart, number, partsBar, spanChart } from "./chart.js";
import { byId, drawIcons, el } from "./dom.js";
import { showRanks } from "./ranks.js";

const kInterval = 1000; // ms between questions
const kWindow = 60; // s of the timeline

function tile(name, value, unit, more) {
  return el("dl", { class: "card tile" }, el("dt", {}, name),
    el("dd", { class: "value" }, value, unit ? el("span", { class: "unit" }, unit) : null), el("dd", { class: "more" }, more));
}

const split = (text) => text.split(/ (?=[^ ]+$)/); // "240 ms" -> "240", "ms"

function latencyTile(name, { count, p50_s, p99_s }) {
  if (!count) return tile(name, "–", "", "nothing measured yet");
  return tile(name, ...split(duration(p50_s)), `half are faster; 99% under ${duration(p99_s)}`);
}

function showTiles({ throughput, latency, requests, steps }) {
  byId("tiles").replaceChildren(
    tile("Writing", number(throughput.generated_tok_s, 1), "tokens/s", `${number(throughput.computed_tok_s, 0)}/s through the model`),
    latencyTile("First token", latency.first_token),
    latencyTile("Between tokens", latency.inter_token),
    tile("Batch", number(requests.running), "running", `${number(requests.waiting)} waiting · ${number(steps.mean_batch, 1)} per step on average`));
}

function showHistory({ history }) {
  lineChart(byId("throughput"), [
    { kind: "two", name: "through the model", values: history.computed_tok_s },
    { kind: "one", name: "written", values: history.generated_tok_s },
  ]);
  lineChart(byId("first-token"), [{ kind: "one", name: "median of each second", values: history.first_token_p50_s }], duration);
  lineChart(byId("requests"), [
    { kind: "one", name: "running", values: history.running },
    { kind: "two", name: "waiting", values: history.waiting },
  ]);
  lineChart(byId("blocks-history"), [
    { kind: "one", name: "in use by requests", values: history.blocks_used },
    { kind: "two", name: "kept for prefixes", values: history.blocks_cached },
  ]);
}

function showBlocks({ blocks }) {
  const { total, used, cached, free, ram, disk } = blocks;
  partsBar(byId("blocks"), `${number(blocks.usage * 100, 1)}%`, "of the pool in use", [
    { kind: "one", name: "in use by requests", size: used, value: number(used) },
    { kind: "two", name: "kept for prefixes", size: cached, value: number(cached) },
    { kind: "rest", name: "free", size: 0, value: number(free) },
    { name: "moved to RAM", size: 0, value: `${number(ram.blocks)} (${bytes(ram.bytes)})` },
    { name: "moved to disk", size: 0, value: `${number(disk.blocks)} (${bytes(disk.bytes)})` },
  ], total || 1);
}

function showPrefix({ cache }) {
  const found = cache.hits_pool + cache.hits_ram + cache.hits_disk;
  partsBar(byId("prefix"), `${number(cache.hit_rate * 100, 1)}%`, "found in the cache", [
    { kind: "one", name: "in the pool", size: cache.hits_pool, value: number(cache.hits_pool) },
    { kind: "two", name: "in RAM", size: cache.hits_ram, value: number(cache.hits_ram) },
    { kind: "three", name: "on disk", size: cache.hits_disk, value: number(cache.hits_disk) },
    { kind: "rest", name: "computed", size: 0, value: number(cache.queries - found) },
  ], cache.queries || 1);
}

function showMemory({ memory }) {
  const { plan, resident } = memory;
  partsBar(byId("memory"), bytes(plan.total), `of ${bytes(plan.available)}`, [
    { kind: "one", name: "weights", size: plan.weights_mapped, value: bytes(plan.weights_mapped) },
    { kind: "one faint", name: "weights, repacked", size: plan.weights_repacked, value: bytes(plan.weights_repacked) },
    { kind: "two", name: "KV pool", size: plan.kv_pool, value: bytes(plan.kv_pool) },
    { kind: "three", name: "workspace", size: plan.workspace, value: bytes(plan.workspace) },
    { name: "resident now", size: 0, value: bytes(resident) },
  ], Math.max(plan.available, plan.total) || 1);
}

function showTimeline({ now, timeline }) {
  spanChart(byId("timeline"), timeline, now, kWindow);
  if (!byId("timeline-rows").closest("details").open) return;
  byId("timeline-rows").replaceChildren(...timeline.map((one) => {
    const cells = [one.id, one.state, duration(one.queue_s), duration(one.first_token_s), duration(one.total_s),
      number(one.prompt_tokens), number(one.cached_tokens), number(one.generated_tokens)];
    return el("tr", {}, ...cells.map((cell) => el("td", {}, cell)));
  }));
}

function showCounters({ requests, throughput, steps, preemptions, speculation, server, latency }) {
  const counters = {
    "Requests finished": number(requests.finished),
    "Cancelled, expired, failed": [requests.cancelled, requests.expired, requests.failed].map((n) => number(n)).join(", "),
    "Prompt tokens": number(throughput.prompt_tokens),
    "Tokens written": number(throughput.generated_tokens),
    "Steps": number(steps.count),
    "Step, median": latency.step.count ? duration(latency.step.p50_s) : "–",
    "In the queue, median": latency.queue.count ? duration(latency.queue.p50_s) : "–",
    "Swapped, recomputed": `${number(preemptions.swap)}, ${number(preemptions.recompute)}`,
    "Drafts accepted": speculation.drafted ? `${number(speculation.acceptance * 100, 1)}% of ${number(speculation.drafted)}` : "none drafted",
    "Connections": `${number(server.connections)} of ${number(server.max_connections)}`,
    "HTTP 2xx, 4xx, 5xx": ["2xx", "4xx", "5xx"].map((kind) => number(server.responses[kind])).join(", "),
    "Running for": duration(server.uptime_s),
  };
  byId("counters").replaceChildren(...Object.entries(counters).map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

// With several models the figures are of all of them, or of the one that is chosen.
function showModels({ models = [] }) {
  const names = JSON.stringify(models.map(({ id, loaded }) => [id, loaded]));
  byId("choose-model").hidden = models.length < 2;
  if (names === showModels.names) return;
  showModels.names = names;
  const which = byId("which-model");
  const chosen = which.value;
  which.replaceChildren(el("option", { value: "" }, `all ${models.length} models`),
    ...models.map(({ id, loaded }) => el("option", { value: id }, `${id} · ${loaded ? "loaded" : "not loaded"}`)));
  which.value = models.some(({ id }) => id === chosen) ? chosen : "";
}

function show(stats) {
  const { model, models = [] } = stats;
  const all = models.length > 1 && !byId("which-model").value;
  showModels(stats);
  byId("model").textContent = all ? `${models.length} models` : model.id;
  const about = all ? [`${models.filter(({ loaded }) => loaded).length} loaded`]
    : model.loaded === false ? ["not loaded"] : [model.architecture, model.device, `context ${number(model.context)}`];
  byId("about").textContent = [...about,
    `Millrace ${stats.server.version}`, stats.server.draining ? "draining: no new requests" : ""].filter(Boolean).join(" · ");
  for (const draw of [showTiles, showHistory, showBlocks, showPrefix, showMemory, showTimeline, showCounters]) draw(stats);
  showRanks(byId("ranks-card"), byId("ranks"), stats);
}

async function poll() {
  const begin = performance.now();
  if (!document.hidden) {
    try {
      const which = byId("which-model").value;
      show(await getJson(which ? `/stats?model=${encodeURIComponent(which)}` : "/stats"));
      byId("trouble").hidden = true;
      byId("key-form").hidden = true;
    } catch (error) {
      if (error.status === undefined) console.error(error);
      byId("key-form").hidden = error.status !== 401;
      byId("trouble").textContent = `${error.message} The figures below are the last ones.`;
      byId("trouble").hidden = error.status === 401;
    }
  }
  setTimeout(poll, Math.max(kInterval - (performance.now() - begin), 100));
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setApiKey(byId("key-entry").value.trim());
  byId("key-entry").value = "";
});
drawIcons();
poll();
