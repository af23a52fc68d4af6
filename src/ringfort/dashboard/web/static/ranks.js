// One row per rank, with a bar that says where the time of its steps goes.

import { byId, keep, make, setAttribute, setText } from "./dom.js";
import { bits, brief, count, percent, rate } from "./format.js";
import { PHASES } from "./phases.js";

export const STATES = {
  training: "", learner: "copies the state", paused: "paused", silent: "silent", lost: "lost",
  ended: "ended", nonsense: "sends nonsense",
};

export const isRunning = (rank) => rank.state !== "lost" && rank.state !== "ended";

/** What to call a rank. */
export const rankName = (rank) => (rank.rank < 0 ? "?" : String(rank.rank));

/** Whether the verdict names a rank: by its machine or, where there is only one machine, by its number. */
export function isCulprit(rank, { culprit }) {
  return Boolean(culprit) && isRunning(rank) && (rank.name === culprit || `rank ${rank.rank}` === culprit);
}

/** What the verdict says of the culprit. */
export const blame = ({ cause }) => (cause === "slow_link" ? "slow link" : "others wait for it");

export function startRanks(onOutput) {
  byId("ranks").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) onOutput(button.dataset.rank);
  });
}

export function showRanks(state) {
  byId("ranks-empty").hidden = state.ranks.length > 0;
  byId("ranks").hidden = state.ranks.length === 0;
  keep(
    byId("ranks").tBodies[0],
    state.ranks,
    (rank) => rank.key,
    createRow,
    (row, rank) => showRow(row, rank, isCulprit(rank, state.verdict) ? blame(state.verdict) : ""),
  );
}

function createRow() {
  return make(
    "tr",
    {},
    make("th", { scope: "row", class: "number" }),
    make("td", { class: "machine" }, make("span", { class: "name" }), make("span", { class: "badge" })),
    make(
      "td",
      { class: "wide" },
      make("div", { class: "bar", role: "img" }, ...PHASES.map(({ name }) => make("span", { class: `phase ${name}` }))),
    ),
    ...["", "optional", "optional", "optional"].map((name) => make("td", { class: `number right ${name}` })),
    make("td", {}, make("button", { type: "button", class: "quiet" }, "Output")),
  );
}

function showRow(row, rank, blamed) {
  const [number, machine, bar, waits, step, samples, sends, output] = row.children;
  setAttribute(row, "data-state", rank.state);
  row.classList.toggle("culprit", Boolean(blamed));
  setText(number, rankName(rank));
  setText(machine.firstChild, rank.name || "unknown");
  setAttribute(machine.firstChild, "title", `${rank.name}, process ${rank.pid}, step ${count(rank.step)}`);
  setText(machine.lastChild, (STATES[rank.state] ?? rank.state) || blamed);
  const total = PHASES.reduce((sum, { name }) => sum + rank.split[name], 0);
  showBar(bar.firstChild, rank, total);
  setText(waits, total ? percent(rank.split.waiting / total) : "–");
  setText(step, total ? brief(total) : "–");
  setText(samples, rank.samples_per_second ? rate(rank.samples_per_second) : "–");
  setText(sends, rank.sent ? bits(rank.sent) : "–");
  const button = output.firstChild;
  button.disabled = rank.rank < 0;
  setAttribute(button, "data-rank", String(rank.rank));
  setAttribute(button, "aria-label", `Output of rank ${rankName(rank)}`);
}

function showBar(bar, rank, total) {
  const said = [];
  PHASES.forEach(({ name, label }, index) => {
    const part = total ? rank.split[name] / total : 0;
    const segment = bar.children[index];
    const width = `${(100 * part).toFixed(1)}%`;
    if (segment.style.width !== width) segment.style.width = width;
    if (part >= 0.005) said.push(`${label} ${percent(part)}`);
    setAttribute(segment, "title", `${label} ${percent(part)}, ${brief(rank.split[name])}`);
  });
  setAttribute(bar, "aria-label", said.join(", ") || "no steps");
}
