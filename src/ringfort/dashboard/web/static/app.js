// The page: messages come in, and the parts that changed are drawn in the next frame.

import { startCurves, showCurves } from "./curves.js";
import { byId, make, setAttribute, setOptions, setText } from "./dom.js";
import { showEvents } from "./events.js";
import { startFigures, showVerdict } from "./figures.js";
import { startGraph, showGraph } from "./graph.js";
import { openLog, showLogRanks, startLogs } from "./logs.js";
import { showMachines } from "./machines.js";
import { startLegend } from "./phases.js";
import { showPlayer, startPlayer } from "./player.js";
import { showRanks, startRanks } from "./ranks.js";
import { Stream } from "./stream.js";
import { startTheme } from "./theme.js";
import { drawTimeline, showAge, showTimeline, startTimeline } from "./timeline.js";

/** What is drawn, and the sections of a view of which it is made. */
const PARTS = [
  [showTitle, ["run", "program", "runs", "recording"]],
  [showVerdict, ["verdict", "notice", "now", "seen", "world_size"]],
  [showPlayer, ["playback"]],
  [showRanks, ["ranks", "verdict"]],
  [showGraph, ["ranks", "links", "verdict"]],
  [showMachines, ["ranks"]],
  [showTimeline, ["timeline"]],
  [showAge, ["now"]],
  [showCurves, ["curves"]],
  [showEvents, ["events"]],
  [showLogRanks, ["ranks", "run"]],
];

const STATUS = {
  connecting: "Connecting",
  live: "Live",
  lost: "Not connected",
  closed: "No access",
};

let view = null;
let changed = new Set();
let status = "connecting";

const stream = new Stream(
  (state, sections) => {
    view = state;
    for (const section of sections) changed.add(section);
  },
  (next) => {
    if (next === status) return;
    status = next;
    showStatus();
  },
);

// Hidden pages get no frames: what comes meanwhile is drawn once, when the page is looked at again.
function frame() {
  if (view && changed.size) {
    const sections = changed;
    changed = new Set();
    for (const [show, needs] of PARTS) if (needs.some((name) => sections.has(name))) show(view);
  }
  drawTimeline();
  requestAnimationFrame(frame);
}

function showTitle(state) {
  const title = state.run || "Ringfort";
  setText(byId("title"), title);
  setText(byId("program"), state.program && state.program !== state.run ? state.program : "");
  document.title = `${title} – Ringfort`;
  byId("run-field").hidden = state.runs.length < 2;
  const select = byId("run");
  setOptions(select, state.runs.map((name) => [name, name]));
  if (document.activeElement !== select) select.value = state.run;
  showStatus();
}

function showStatus() {
  const node = byId("status");
  setAttribute(node, "data-state", status);
  setText(node, status === "live" && view?.recording ? "Recording" : STATUS[status]);
  const banner = byId("banner");
  banner.hidden = status !== "lost" && status !== "closed";
  document.body.classList.toggle("stale", !banner.hidden);
  if (banner.hidden || banner.dataset.status === status) return;
  banner.dataset.status = status;
  banner.replaceChildren(...(status === "lost" ? lostWords() : closedWords()));
}

function lostWords() {
  return [
    make("strong", {}, "ringfort dash does not answer. "),
    "This is the last view. The page connects by itself when it is back; if it has ended, type ",
    make("code", {}, "ringfort dash"),
    ".",
  ];
}

function closedWords() {
  return [
    make("strong", {}, "This browser has no access any more. "),
    "In the terminal in which ringfort dash runs, press ",
    make("kbd", {}, "Enter"),
    " and open the link that it prints; or type ",
    make("code", {}, "ringfort dash"),
    ".",
  ];
}

startTheme();
startLegend();
startFigures();
startRanks(openLog);
startGraph();
startTimeline();
startCurves();
startLogs();
startPlayer();
byId("run").addEventListener("change", () => stream.open(byId("run").value));
stream.open(null);
requestAnimationFrame(frame);
