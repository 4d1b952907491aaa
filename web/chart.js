// Charts drawn by hand in SVG: lines over time, a bar of parts, and requests as spans. Each draws into a node at the
// width that it has, and says in its label what a reader who cannot see it would want to know.
import { el, svg } from "./dom.js";

const kHeight = 150; // of a line chart, in pixels
const kLane = 14; // of a span, with its gap

export const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

export function duration(s) {
  if (s === null || s === undefined) return "–";
  if (s < 0.0995) return `${(s * 1000).toFixed(1)} ms`;
  if (s < 0.9995) return `${(s * 1000).toFixed(0)} ms`;
  if (s < 120) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(s / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit++) value /= 1024;
  return `${number(value, value < 10 && unit ? 2 : value < 100 && unit ? 1 : 0)} ${units[unit]}`;
}

// The next round number: the top of an axis should not tremble.
function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((top) => top >= value * 0.999);
}

function swatch(kind) {
  return svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true", class: kind }, svg("rect", { class: "bar", width: 10, height: 10, rx: 3 }));
}

// entries: [{ kind, name, value }]; what is not in the picture has no kind.
export function legend(entries, long = false) {
  const items = entries.map(({ kind, name, value }) =>
    el("li", {}, kind ? swatch(kind) : null, name, value === undefined ? null : el("b", {}, value)));
  return el("ul", { class: long ? "legend long" : "legend" }, ...items);
}

// Runs of values without a null between them, as [index of the first, values].
function runs(values) {
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i && values[i - 1] !== null) found.at(-1)[1].push(value);
    else found.push([i, [value]]);
  });
  return found;
}

// series: [{ kind, name, values }]: a value a second, newest last; null where there was nothing to measure: no line leads
// over such a gap, and a value between two gaps is a dot.
export function lineChart(node, series, show = (value) => number(value)) {
  const width = Math.max(node.clientWidth, 100);
  const count = Math.max(...series.map(({ values }) => values.length), 2);
  const top = roundUp(Math.max(...series.flatMap(({ values }) => values), 0));
  const base = kHeight - 20;
  const y = (value) => Math.round((base - (value / top) * (base - 18)) * 10) / 10;
  const shapes = [0, 0.5, 1].map((part) => svg("path", { class: "rule", d: `M0 ${Math.round(y(part * top)) + 0.5}H${width}` }));
  const last = series.map(({ values }) => values.findLast((value) => value !== null));
  series.forEach(({ kind, values }) => {
    const x = (i) => (((count - values.length + i) / (count - 1)) * width).toFixed(1);
    for (const [first, run] of runs(values)) {
      const points = run.map((value, i) => [x(first + i), y(value)]);
      if (points.length === 1) {
        shapes.push(svg("circle", { class: `bar ${kind}`, cx: points[0][0], cy: points[0][1], r: 2 }));
        continue;
      }
      const path = points.map((point) => point.join(" ")).join("L");
      const area = `M${points[0][0]} ${base}L${path}L${points.at(-1)[0]} ${base}Z`;
      shapes.push(svg("path", { class: `area ${kind}`, d: area }), svg("path", { class: `line ${kind}`, d: `M${path}` }));
    }
  });
  const entries = series.map(({ kind, name }, i) => ({ kind, name, value: last[i] === undefined ? "–" : show(last[i]) }));
  const label = entries.map(({ name, value }) => `${name} ${value}`).join(", ");
  node.replaceChildren(
    svg("svg", { class: "chart", viewBox: `0 0 ${width} ${kHeight}`, height: kHeight, role: "img", "aria-label": label }, ...shapes,
      svg("text", { x: 0, y: 12 }, show(top)),
      svg("text", { x: 0, y: kHeight - 3 }, count > 90 ? `${Math.round(count / 60)} min ago` : `${count} s ago`),
      svg("text", { x: width, y: kHeight - 3, "text-anchor": "end" }, "now")),
    legend(entries));
}

// parts: [{ kind, name, size, value }]; the bar's whole length is `whole`.
export function partsBar(node, headline, note, parts, whole) {
  const width = Math.max(node.clientWidth, 100);
  let at = 0;
  const rects = parts.filter(({ size }) => size > 0).map(({ kind, size }) => {
    const length = Math.max((size / whole) * width, 1.5);
    const rect = svg("rect", { class: `bar ${kind}`, x: at, width: Math.max(length - 1.5, 1), height: 12, rx: 2 });
    at += length;
    return rect;
  });
  const label = parts.map(({ name, value }) => `${name} ${value}`).join(", ");
  node.replaceChildren(
    el("p", { class: "headline" }, headline, el("small", {}, note)),
    svg("svg", { class: "chart", viewBox: `0 0 ${width} 12`, height: 12, role: "img", "aria-label": label },
      svg("rect", { class: "bar rest", width, height: 12, rx: 3 }), ...rects),
    legend(parts, true));
}

// Requests as spans over the last `window` seconds, each in the first lane that is free.
export function spanChart(node, requests, now, window) {
  const width = Math.max(node.clientWidth, 100);
  const x = (time) => Math.max(0, Math.min(1, 1 - (now - time) / window)) * width;
  const lanes = []; // where each is free again
  const shapes = [];
  for (const request of [...requests].reverse()) {
    const ends = request.start + (request.total_s ?? now - request.start);
    if (ends < now - window) continue;
    let lane = lanes.findIndex((free) => free <= x(request.start));
    if (lane < 0) lane = lanes.length;
    lanes[lane] = x(ends) + 4;
    shapes.push(span(request, x, ends, lane * kLane));
  }
  const height = Math.max(lanes.length, 4) * kLane + 22;
  const rules = [0, 1, 2, 3, 4].map((i) => svg("path", { class: "rule", d: `M${Math.round((i / 4) * (width - 1)) + 0.5} 0V${height - 20}` }));
  node.replaceChildren(
    svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, role: "img",
      "aria-label": `${shapes.length} requests in the last ${window} seconds; the table below lists them` }, ...rules, ...shapes,
      svg("text", { x: 0, y: height - 3 }, `${window} s ago`),
      svg("text", { x: width, y: height - 3, "text-anchor": "end" }, shapes.length ? "now" : "no requests yet")),
    legend([{ kind: "three", name: "waiting" }, { kind: "two", name: "reading the prompt" }, { kind: "one", name: "writing" },
      { kind: "failed", name: "failed" }]));
}

function span(request, x, ends, y) {
  const queued = request.start + (request.queue_s ?? ends - request.start);
  const first = request.start + (request.first_token_s ?? ends - request.start);
  const writing = request.state === "failed" ? "failed" : request.state === "cancelled" ? "one faint" : "one";
  const pieces = [["three", request.start, queued], ["two", queued, first], [writing, first, ends]];
  const rects = pieces.filter(([, from, to]) => to > from).map(([kind, from, to]) =>
    svg("rect", { class: `bar ${kind}`, x: x(from), y: y + 1, width: Math.max(x(to) - x(from), 1), height: kLane - 4, rx: 2 }));
  if (request.state === "failed") rects.push(svg("rect", { class: "bar failed", x: x(ends) - 3, y: y + 1, width: 3, height: kLane - 4 }));
  const title = `${request.id}: ${request.state}, ${request.prompt_tokens} prompt tokens, ${request.cached_tokens} cached, ` +
    `${request.generated_tokens} written, first token ${duration(request.first_token_s)}, total ${duration(request.total_s)}`;
  return svg("g", {}, svg("title", {}, title), ...rects);
}
