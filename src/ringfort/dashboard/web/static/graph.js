// Machines and the links between them. Each link is a pipe as wide as others, filled by the part that is used.

import { byId, keep, make, makeSvg, setAttribute, setText } from "./dom.js";
import { bits, bitsOf, brief, isNumber, percent, ranges, shortened } from "./format.js";
import { blame, isRunning } from "./ranks.js";

const PIPE = 9;
const FULL = 0.8; // The part of a link from which on it is called full.
const MAX_EDGES = 64; // Links that are drawn: those that carry most. All of them are in the table.
const MAX_LABELS = 6;
const TIGHT = 440; // Pixels below which a crowd has no room for names, and a link for more than a number.
const CROWD = 8; // Machines from which on there is no room for words beside links.

const empty = { ranks: [], links: {}, verdict: {} };

let chosen = null;
let latest = empty;
let width = 520;
let height = 330;

export function startGraph() {
  const svg = makeSvg(
    "svg",
    { role: "group", "aria-label": "Machines. Choose one to see only its links." },
    makeSvg("g", { class: "edges", "aria-hidden": "true" }),
    makeSvg("g", { class: "labels", "aria-hidden": "true" }),
    makeSvg("g", { class: "nodes" }),
  );
  byId("graph").append(svg);
  const choose = (event) => {
    const node = event.target.closest(".node");
    if (!node || (event.type === "keydown" && event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    chosen = chosen === node.dataset.key ? null : node.dataset.key;
    showGraph(latest);
  };
  svg.addEventListener("click", choose);
  svg.addEventListener("keydown", choose);
  byId("links-details").addEventListener("toggle", () => showGraph(latest));
  // One unit is one pixel, so that text has the same size in a narrow window.
  new ResizeObserver(([box]) => {
    width = Math.max(280, Math.round(box.contentRect.width));
    showGraph(latest);
  }).observe(byId("graph"));
}

/** The machines of a state, by host. */
export function machinesOf(state) {
  const machines = new Map();
  for (const rank of state.ranks) {
    const host = rank.host || rank.name;
    if (!machines.has(host)) machines.set(host, { host, name: rank.name || "unknown", ranks: [], vitals: {} });
    const machine = machines.get(host);
    machine.ranks.push(rank);
    if (isRunning(rank)) machine.vitals = rank.vitals;
  }
  return [...machines.values()];
}

export function showGraph(state) {
  latest = state;
  const machines = machinesOf(state);
  if (!machines.some(({ host }) => host === chosen)) chosen = null;
  byId("graph-empty").hidden = machines.length > 0;
  byId("graph").firstChild.classList.toggle("without", !machines.length);
  height = machines.length < 2 ? 130 : Math.round(Math.min(360, Math.max(270, width * 0.6)));
  setAttribute(byId("graph").firstChild, "viewBox", `0 0 ${width} ${height}`);
  setAttribute(byId("graph").firstChild, "height", String(height));
  const places = placed(machines);
  const pairs = pairsOf(Object.values(state.links), places);
  const isCrowded = machines.length > CROWD;
  const shown = pairs
    .filter(({ a, b, used }) => (chosen ? a === chosen || b === chosen : used > 0 || !isCrowded))
    .slice(0, MAX_EDGES);
  const [edges, labels, nodes] = byId("graph").firstChild.children;
  keep(edges, shown, ({ key }) => key, createEdge, (edge, pair) => showEdge(edge, pair, places));
  const labelled = isCrowded ? [] : shown.slice(0, MAX_LABELS);
  keep(labels, labelled, ({ key }) => key, createLabel, (label, pair) => showLabel(label, pair, places));
  keep(nodes, machines, ({ host }) => host, createNode, (node, machine) =>
    showNode(node, machine, places.get(machine.host), state),
  );
  setText(byId("graph-hint"), hint(machines, pairs));
  byId("links-details").hidden = !Object.keys(state.links).length;
  if (byId("links-details").open) showLinks(state, machines);
}

function hint(machines, pairs) {
  if (machines.length < 2) return machines.length ? "All ranks are on one machine" : "";
  const busiest = pairs.find(({ load }) => load !== null);
  return busiest ? `busiest link ${percent(busiest.load)}` : "";
}

/** Where each machine is: on an ellipse that fills the picture. Two are side by side, three have a flat top. */
function placed(machines) {
  const number = machines.length;
  const turns = machines.map((_, index) => -Math.PI / 2 + (Math.PI * (2 * index - 1)) / number);
  const filled = (values, from, to) => {
    const [least, greatest] = [Math.min(...values), Math.max(...values)];
    const room = greatest - least > 0.01 ? (to - from) / (greatest - least) : 0;
    return values.map((value) => (room ? from + (value - least) * room : (from + to) / 2));
  };
  const isCrowded = number > CROWD;
  const isTight = isCrowded && width < TIGHT;
  const size = isTight ? 10 : isCrowded ? 13 : number > 6 ? 18 : 26;
  const [side, top] = isTight ? [14, 14] : isCrowded ? [86, 40] : [78, 62];
  const xs = filled(turns.map(Math.cos), side, width - side);
  const ys = filled(turns.map(Math.sin), top, height - top);
  // At the top and the bottom of a crowd, names would touch: every second one is further out.
  const isOdd = (i) => i % 2 === 1 && Math.abs(Math.cos(turns[i])) < 0.3;
  return new Map(
    machines.map(({ host }, i) => [host, { x: xs[i], y: ys[i], turn: turns[i], isOdd: isOdd(i), size, isCrowded }]),
  );
}

/** Both directions of each pair of machines, the fullest first. */
function pairsOf(links, places) {
  const pairs = new Map();
  for (const link of links) {
    if (link.source === link.target || !places.has(link.source) || !places.has(link.target)) continue;
    const [a, b] = [link.source, link.target].sort();
    const key = `${a}|${b}`;
    if (!pairs.has(key)) pairs.set(key, { key, a, b, used: 0, load: null, measured: null, kind: "" });
    const pair = pairs.get(key);
    const load = isNumber(link.measured) && link.measured > 0 ? link.used / link.measured : null;
    pair.kind ||= link.kind;
    // The direction that is closer to its limit counts.
    if (pair.load === null ? load !== null || link.used >= pair.used : load !== null && load > pair.load) {
      Object.assign(pair, { used: link.used, load, measured: link.measured });
    }
  }
  return [...pairs.values()].sort((one, other) => (other.load ?? -1) - (one.load ?? -1) || other.used - one.used);
}

function createEdge() {
  return makeSvg("g", {}, makeSvg("line", { class: "pipe" }), makeSvg("line", { class: "load" }));
}

function showEdge(edge, { a, b, load, used }, places) {
  const [from, to] = [places.get(a), places.get(b)];
  const ends = { x1: from.x, y1: from.y, x2: to.x, y2: to.y };
  const pipe = from.isCrowded ? PIPE / 2 : PIPE;
  for (const line of edge.children) for (const [name, at] of Object.entries(ends)) setAttribute(line, name, at.toFixed(1));
  edge.setAttribute("class", load === null ? "edge unknown" : load >= FULL ? "edge full" : "edge");
  setAttribute(edge.firstChild, "stroke-width", String(pipe));
  const filled = load === null ? (used > 0 ? 2 : 0) : Math.min(1, load) * (pipe - 2);
  setAttribute(edge.lastChild, "stroke-width", used > 0 ? Math.max(1, filled).toFixed(1) : "0");
}

function createLabel() {
  const lines = [makeSvg("tspan", {}), makeSvg("tspan", { dy: "1.25em" })];
  return makeSvg("g", {}, makeSvg("rect", { rx: 4 }), makeSvg("text", { "text-anchor": "middle" }, ...lines));
}

function showLabel(label, { a, b, used, measured, load, kind }, places) {
  const [from, to] = [places.get(a), places.get(b)];
  // Not in the middle, where the labels of crossing links would meet.
  const at = places.size > 3 ? 0.34 : 0.5;
  const [x, y] = [from.x + (to.x - from.x) * at, from.y + (to.y - from.y) * at];
  const [rect, text] = label.children;
  setAttribute(text, "y", (y - 4).toFixed(1));
  for (const line of text.children) setAttribute(line, "x", x.toFixed(1));
  const rates = isNumber(measured) ? bitsOf(used, measured) : bits(used);
  const rest = [kind, load === null ? "" : percent(load)].filter(Boolean).join(", ");
  const words = width >= TIGHT ? [rates, rest] : [load === null ? bits(used) : percent(load), ""];
  if (label.dataset.words !== words.join("|")) {
    label.dataset.words = words.join("|");
    words.forEach((word, index) => setText(text.children[index], word));
    label.dataset.width = Math.max(...[...text.children].map((line) => line.getComputedTextLength())) + 10;
  }
  const wide = Number(label.dataset.width);
  const size = { x: x - wide / 2, y: y - 18, width: wide, height: words[1] ? 34 : 20 };
  for (const [name, value] of Object.entries(size)) setAttribute(rect, name, value.toFixed(1));
}

function createNode() {
  return makeSvg(
    "g",
    { class: "node", tabindex: "0", role: "button" },
    makeSvg("circle", {}),
    makeSvg("text", { class: "inside", "text-anchor": "middle", "dominant-baseline": "central" }),
    makeSvg("text", { class: "below", "text-anchor": "middle" }),
    makeSvg("text", { class: "note", "text-anchor": "middle" }),
  );
}

function showNode(node, machine, place, state) {
  const [circle, inside, below, note] = node.children;
  // Where there is only one machine, the culprit is one of its ranks.
  const isBlamed = state.verdict.culprit !== "" && machine.name === state.verdict.culprit;
  const states = new Set(machine.ranks.map((rank) => rank.state));
  const mood = states.size === 1 && !states.has("training") ? [...states][0] : "training";
  node.setAttribute("class", `node ${isBlamed ? "culprit" : ""} ${place.isCrowded ? "crowded" : ""}`);
  setAttribute(node, "data-state", mood);
  setAttribute(node, "aria-pressed", String(chosen === machine.host));
  for (const [name, value] of [["cx", place.x], ["cy", place.y], ["r", place.size]]) {
    setAttribute(circle, name, value.toFixed(1));
  }
  const numbers = ranges(machine.ranks.filter((rank) => rank.rank >= 0).map((rank) => rank.rank));
  put(inside, place.x, place.y, numbers.length <= 7 ? numbers : String(machine.ranks.length));
  // Outside of the ring, where no link is: above machines of the upper half, below the others.
  const isAbove = Math.sin(place.turn) < -0.1;
  const side = place.isCrowded ? Math.cos(place.turn) : 0;
  const [dx, dy] = place.isCrowded
    ? [side * (place.size + 6), Math.sin(place.turn) * (place.size + (place.isOdd ? 20 : 9)) + 4]
    : [0, isAbove ? -place.size - 10 : place.size + 17];
  setAttribute(below, "text-anchor", side > 0.25 ? "start" : side < -0.25 ? "end" : "middle");
  const isNamed = !place.isCrowded || width >= TIGHT || chosen === machine.host;
  below.classList.toggle("unseen", !isNamed); // and still read out
  put(below, place.x + dx, place.y + dy, shortened(machine.name, place.isCrowded ? 10 : 18));
  const inMachine = state.links[`${machine.host}|${machine.host}`]?.used ?? 0;
  const words = mood !== "training" ? mood : isBlamed ? blame(state.verdict) : inMachine ? `${bits(inMachine)} inside` : "";
  put(note, place.x, place.y + (isAbove ? -place.size - 26 : place.size + 32), place.isCrowded ? "" : words);
}

function put(text, x, y, words) {
  setAttribute(text, "x", x.toFixed(1));
  setAttribute(text, "y", y.toFixed(1));
  setText(text, words);
}

function showLinks(state, machines) {
  const names = new Map(machines.map(({ host, name }) => [host, name]));
  const links = Object.entries(state.links)
    .sort(([one], [other]) => one.localeCompare(other))
    .map(([, link]) => link)
    .filter(({ source, target }) => !chosen || source === chosen || target === chosen);
  keep(
    byId("links").tBodies[0],
    links,
    ({ source, target }) => `${source}|${target}`,
    () => make("tr", {}, ...["", "", "number right", "number right", "number right", ""].map((name) => make("td", { class: name }))),
    (row, link) => {
      const used = isNumber(link.measured) && link.measured > 0 ? ` (${percent(link.used / link.measured)})` : "";
      const cells = [
        names.get(link.source) ?? link.source,
        names.get(link.target) ?? link.target,
        bits(link.used) + used,
        bits(link.measured),
        brief(link.round_trip),
        link.kind || "unknown",
      ];
      cells.forEach((text, index) => setText(row.children[index], text));
    },
  );
}
