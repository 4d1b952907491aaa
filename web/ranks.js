// The ranks that share a model, of /stats' rank_groups: who is there, what every link is and carries, and how often a
// group was formed anew. A link is as thick as what it carries now is beside the busiest one.
import { bytes, duration, number } from "./chart.js";
import { el, svg } from "./dom.js";

const kHeight = 230; // of a group's picture, in pixels
const kRadius = 17; // of a rank
const kLate = 1.5; // s: a rank says twice a second that it is there

const latency = (s) => (s !== null && s < 1e-3 ? `${(s * 1e6).toFixed(0)} µs` : duration(s));
const perSecond = (rate) => `${bytes(rate)}/s`;

// Links of a group, both ways together: [{ a, b, hosts, moved, latency_s, bytes_per_s }].
function linksOf({ ranks }) {
  const links = [];
  for (const one of ranks) {
    for (const other of ranks) {
      if (other.rank <= one.rank) continue;
      links.push({ a: one.rank, b: other.rank, hosts: `${one.host}, ${other.host}`, moved: one.sent_bytes[other.rank] + other.sent_bytes[one.rank],
        latency_s: one.latency_s[other.rank] || null, bytes_per_s: one.bytes_per_s[other.rank] || null });
    }
  }
  return links;
}

const seen = new Map(); // group's number -> { now, who, moved by link }: what the rates count from

// Adds `rate`, bytes a second since the figures before these; null where there are none of the same processes.
function addRates(group, which, links, now) {
  const who = group.ranks.map(({ pid }) => pid).join(" ");
  const before = seen.get(which);
  const same = before && before.who === who && now > before.now;
  for (const link of links) {
    link.rate = same ? Math.max(link.moved - (before.moved.get(`${link.a}-${link.b}`) ?? 0), 0) / (now - before.now) : null;
  }
  seen.set(which, { now, who, moved: new Map(links.map(({ a, b, moved }) => [`${a}-${b}`, moved])) });
}

function stateOf(rank) {
  if (!rank) return { kind: "rest", text: "not there" };
  if (rank.heard_s > kLate) return { kind: "failed", text: `silent for ${duration(rank.heard_s)}` };
  return { kind: "one", text: rank.waiting_s > kLate ? `waits for another for ${duration(rank.waiting_s)}` : "alive" };
}

function picture(group, links, width) {
  const count = Math.max(group.wanted, group.ranks.length);
  const place = (rank) => {
    const angle = (rank / count) * 2 * Math.PI - Math.PI / 2;
    const across = Math.min(width / 2 - 90, 240);
    return [width / 2 + Math.cos(angle) * across, kHeight / 2 - 8 + Math.sin(angle) * (kHeight / 2 - 42)];
  };
  const busiest = Math.max(...links.map(({ rate }) => rate ?? 0), 1);
  const lines = links.map(({ a, b, rate, latency_s, bytes_per_s, moved }) => {
    const [[x1, y1], [x2, y2]] = [place(a), place(b)];
    const title = `rank ${a} and rank ${b}: ${latency(latency_s)}, ${bytes_per_s ? perSecond(bytes_per_s) : "–"}; ` +
      `${bytes(moved)} so far${rate === null ? "" : `, ${perSecond(rate)} now`}`;
    return svg("line", { class: "link", x1, y1, x2, y2, "stroke-width": (1 + 5 * (rate ?? 0) / busiest).toFixed(1) }, svg("title", {}, title));
  });
  const nodes = Array.from({ length: count }, (_, i) => {
    const [x, y] = place(i);
    const rank = group.ranks.find((one) => one.rank === i);
    const { kind, text } = stateOf(rank);
    return svg("g", { class: `rank ${kind}` }, svg("title", {}, `rank ${i}: ${text}`),
      svg("circle", { class: "bar", cx: x, cy: y, r: kRadius }),
      svg("text", { class: "name", x, y: y + 4.5, "text-anchor": "middle" }, String(i)),
      svg("text", { x, y: y + kRadius + 14, "text-anchor": "middle" }, rank ? rank.host : text));
  });
  const label = Array.from({ length: count }, (_, i) => `rank ${i} ${stateOf(group.ranks.find((one) => one.rank === i)).text}`).join(", ");
  return svg("svg", { class: "chart", viewBox: `0 0 ${width} ${kHeight}`, height: kHeight, role: "img", "aria-label": label }, ...lines, ...nodes);
}

function table(name, heads, rows) {
  return el("div", { class: "table", tabindex: 0, role: "region", "aria-label": name }, el("table", {},
    el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, cell)))))));
}

function groupPart(group, which, now, width) {
  const links = linksOf(group);
  addRates(group, which, links, now);
  const restarts = group.restarts === 1 ? "formed anew once" : `formed anew ${number(group.restarts)} times`;
  const notes = [group.restarts ? restarts : "never lost", group.up ? "" : "being formed", group.last_loss ? `last: ${group.last_loss}` : ""];
  return el("div", { class: "ranks" },
    el("p", { class: "headline" }, `${group.ranks.length} of ${group.wanted}`, el("small", {}, notes.filter(Boolean).join(" · "))),
    picture(group, links, width),
    table("Ranks", ["Rank", "Host", "Process", "State", "Heard", "Exchanges"], group.ranks.map((rank) =>
      [String(rank.rank), rank.host, String(rank.pid), stateOf(rank).text, `${duration(rank.heard_s)} ago`, number(rank.exchanges)])),
    links.length ? table("Links", ["Link", "Hosts", "Latency", "Bandwidth", "Now", "So far"], links.map(({ a, b, hosts, latency_s, bytes_per_s, rate, moved }) =>
      [`${a} – ${b}`, hosts, latency(latency_s), bytes_per_s ? perSecond(bytes_per_s) : "–", rate === null ? "–" : perSecond(rate), bytes(moved)])) : null);
}

// Of servers that started none, nothing is shown.
export function showRanks(card, node, { rank_groups: groups = [], rank_sampling: sampling, now }) {
  card.hidden = groups.length === 0;
  if (card.hidden) return;
  const width = Math.max(node.clientWidth, 300);
  const picked = sampling && sampling.picked_rows + sampling.gathered_rows > 0 ? el("p", { class: "note" },
    `Tokens picked without bringing logits together: ${number(sampling.picked_rows)} of ${number(sampling.picked_rows + sampling.gathered_rows)}`) : null;
  node.replaceChildren(...groups.map((group, i) => groupPart(group, i, now, width)), ...[picked].filter(Boolean));
}
