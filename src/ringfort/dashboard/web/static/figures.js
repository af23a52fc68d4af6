// The sentence on top, and the figures below it.

import { byId, make, setAttribute, setText } from "./dom.js";
import { count, duration, figure, isNumber, rate } from "./format.js";

const CAUSES = {
  well: "All well", slow_machine: "Slow machine", slow_link: "Slow link", exchange: "Exchange", data: "Data loading",
  codec: "Compression", seal: "Agreement", uneven: "In turn", unknown: "",
};

const FIGURES = [
  {
    name: "Step",
    value: (verdict) => (verdict.step ? count(verdict.step) : "–"),
    note: (verdict) => (verdict.total_steps ? `of ${count(verdict.total_steps)}` : ""),
    part: (verdict) => (verdict.total_steps ? Math.min(1, verdict.step / verdict.total_steps) : null),
  },
  { name: "Loss", value: (verdict) => figure(verdict.loss) },
  {
    name: "Throughput",
    value: (verdict) => rate(verdict.samples_per_second || verdict.steps_per_second || null),
    note: (verdict, state) => (isNumber(verdict.samples_per_second) ? `samples/s${ofSome(state)}` : "steps/s"),
  },
  {
    name: "Time left",
    value: (verdict) => duration(verdict.eta),
    note: (verdict, state) =>
      isNumber(verdict.eta) && !state.recording ? `until ${ends(state.now + verdict.eta, state.now)}` : "",
  },
  {
    name: "Speed-up",
    value: (verdict) => (isNumber(verdict.speed_up) ? `${verdict.speed_up.toFixed(verdict.speed_up < 10 ? 2 : 1)}×` : "–"),
    note: (_, state) => ofSome(state) ? "not all ranks are seen" : "of the fastest alone",
  },
];

/** Of how many ranks a figure is, if not of all. */
const ofSome = ({ seen, world_size: all }) => (seen < all ? ` of ${seen} of ${all} ranks` : "");

function ends(at, now) {
  const date = new Date(at * 1000);
  const time = date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  const today = new Date(now * 1000);
  if (date.toDateString() === today.toDateString()) return time;
  const day = { day: "numeric", month: "short" };
  if (date.getFullYear() === today.getFullYear()) return `${date.toLocaleDateString("en-GB", day)}, ${time}`;
  return date.toLocaleDateString("en-GB", { ...day, year: "numeric" });
}

export function startFigures() {
  byId("figures").append(
    ...FIGURES.map(({ name }) =>
      make("div", {}, make("dt", {}, name), make("dd", { class: "value" }), make("dd", { class: "note" })),
    ),
  );
}

export function showVerdict(state) {
  const { verdict } = state;
  setAttribute(byId("verdict"), "data-cause", verdict.cause ?? "unknown");
  showSentence(byId("sentence"), verdict);
  const notice = byId("notice");
  notice.hidden = !state.notice;
  setText(notice, state.notice);
  [...byId("figures").children].forEach((tile, index) => showFigure(tile, FIGURES[index], state));
}

function showSentence(node, verdict) {
  const sentence = verdict.sentence || "Waiting for the first steps.";
  const word = CAUSES[verdict.cause] ?? "";
  const cause = sentence.startsWith(word) ? "" : word;
  if (node.dataset.shown === `${cause}|${sentence}`) return;
  node.dataset.shown = `${cause}|${sentence}`;
  // At the beginning of a sentence, `rank 1` has a capital.
  const name = sentence.startsWith("Rank") ? capital(verdict.culprit) : verdict.culprit;
  const [culprit, where] = [name, verdict.culprit]
    .map((word) => [word, wordIn(sentence, word)])
    .find(([, at]) => at >= 0) ?? ["", -1];
  const parts =
    where < 0
      ? [sentence]
      : [sentence.slice(0, where), make("strong", {}, culprit), sentence.slice(where + culprit.length)];
  const badge = cause ? [make("span", { class: "cause" }, cause), " "] : [];
  node.replaceChildren(...badge, ...parts);
}

const capital = (name) => name?.replace(/^rank/, "Rank");

/** Where a name is in a sentence, as a word of its own; -1 if it is not. */
function wordIn(sentence, name) {
  const isPart = (character) => /[\p{L}\p{N}]/u.test(character ?? "");
  for (let at = name ? sentence.indexOf(name) : -1; at >= 0; at = sentence.indexOf(name, at + 1)) {
    if (!isPart(sentence[at - 1]) && !isPart(sentence[at + name.length])) return at;
  }
  return -1;
}

function showFigure(tile, { value, note, part }, state) {
  const [, shown, beside] = tile.children;
  setText(shown, value(state.verdict));
  setText(beside, note?.(state.verdict, state) ?? "");
  const fraction = part?.(state.verdict) ?? null;
  tile.classList.toggle("progress", fraction !== null);
  if (fraction !== null) tile.style.setProperty("--part", fraction.toFixed(4));
}
