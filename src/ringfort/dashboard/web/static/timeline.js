// The latest steps of each rank, side by side: who waits stands still while another computes.

import { byId, setText } from "./dom.js";
import { brief, count, duration, percent, shortened, ticks } from "./format.js";
import { fillOf, lengthOf, PHASES, secondsOf } from "./phases.js";
import { isRunning } from "./ranks.js";
import { colour, onTheme } from "./theme.js";

const AXIS = 24;
const TOP = 4;
const AGED = 3; // Seconds. Reports come once a second.
const PATTERNED = 5; // Pixels from which on a pattern can be seen.

let canvas;
let pen;
let rows = []; // [{rank, name, steps}]
let range = [0, 1];
let age = 0; // Seconds since its end; 0 if that is now, as far as people can tell.
let chosen = null; // {rank, number}
let isDirty = true;
let latest = null;
let room = 0; // The width of the canvas, in pixels.
let family = "sans-serif";

export function startTimeline() {
  const box = byId("timeline-canvas");
  canvas = document.createElement("canvas");
  pen = canvas.getContext("2d");
  box.append(canvas);
  // Asking for a size or a style in a frame makes the browser lay out the whole page at once.
  new ResizeObserver(([{ contentRect }]) => {
    room = contentRect.width;
    redraw();
  }).observe(box);
  family = getComputedStyle(box).fontFamily;
  onTheme(redraw);
  if (window.innerWidth < 620) byId("timeline-steps").value = "6";
  byId("timeline-steps").addEventListener("change", () => latest && showTimeline(latest));
  canvas.addEventListener("pointermove", (event) => choose(at(event.offsetX, event.offsetY)));
  canvas.addEventListener("pointerleave", () => document.activeElement !== box && choose(null));
  box.addEventListener("keydown", move);
  box.addEventListener("blur", () => choose(null));
}

export function showTimeline(state) {
  latest = state;
  const most = Number(byId("timeline-steps").value);
  const runningLast = [...state.ranks].sort((a, b) => isRunning(a) - isRunning(b));
  const names = new Map(runningLast.map(({ rank, name }) => [rank, name]));
  rows = Object.keys(state.timeline)
    .map(Number)
    .sort((a, b) => a - b)
    .map((rank) => ({ rank, name: names.get(rank) ?? "", steps: state.timeline[rank] }));
  const numbers = [...new Set(rows.flatMap(({ steps }) => steps.map((step) => step[0])))].sort((a, b) => a - b);
  const [first, last] = chosenSteps(numbers, most);
  for (const row of rows) row.steps = row.steps.filter((step) => first <= step[0] && step[0] <= last);
  if (rows.some(({ steps }) => steps.length)) {
    const [start, end] = shownTime(first, last);
    range = [start, Math.max(end, start + 1e-3)];
  }
  showAge(state);
  redraw();
}

/** How long ago the last step ended, which changes without a new step. */
export function showAge(state) {
  const seconds = Math.round(state.now - range[1]);
  const next = seconds > AGED ? seconds : 0;
  if (next !== age) redraw();
  age = next;
}

/** From when to when all ranks that made the first and the last step were in one of the steps between them. Ranks begin
 *  and end a step at slightly different times; what is beyond is cut off, so that both edges are even. */
function shownTime(first, last) {
  const full = rows.filter(({ steps }) => steps.length);
  const begins = full.filter(({ steps }) => steps[0][0] === first).map(({ steps }) => steps[0][1]);
  const ends = full
    .filter(({ steps }) => steps.at(-1)[0] === last)
    .map(({ steps }) => steps.at(-1)[1] + lengthOf(steps.at(-1)));
  const [start, end] = [Math.max(...begins), Math.min(...ends)];
  return start < end ? [start, end] : [Math.min(...begins), Math.max(...ends)];
}

/** The first and the last of the newest `most` steps, if possible of some without one missing between them: if steps are
 *  short, ranks send 16 that follow each other and then leave out some. */
function chosenSteps(numbers, most) {
  let length = 0;
  let end = 0; // Behind the newest stretch that is long enough.
  numbers.forEach((number, index) => {
    length = numbers[index - 1] === number - 1 ? length + 1 : 1;
    if (length >= most) end = index + 1;
  });
  end ||= numbers.length;
  return [numbers[Math.max(0, end - most)] ?? 0, numbers[end - 1] ?? 0];
}

/** Draws at most once per frame. */
export function drawTimeline() {
  if (!isDirty || !canvas) return;
  isDirty = false;
  draw();
}

function redraw() {
  isDirty = true;
}

const rowHeight = () => (rows.length > 16 ? 15 : rows.length > 8 ? 20 : 28);
const margin = (width) => (width < 500 ? 94 : 132);

function draw() {
  const ratio = window.devicePixelRatio || 1;
  const width = room;
  const height = TOP + Math.max(1, rows.length) * rowHeight() + AXIS;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.textBaseline = "middle";
  pen.font = `12px ${family}`;
  const left = margin(width);
  if (rows.some(({ steps }) => steps.length)) drawAxis(left, width, height);
  drawNames(left);
  drawSteps(left, width);
  if (!rows.length) {
    pen.textAlign = "left";
    pen.font = `15px ${family}`;
    pen.fillStyle = colour("muted");
    pen.fillText(latest?.verdict.step ? "No recent steps." : "No steps yet.", 0, TOP + rowHeight() / 2);
  }
}

const scale = (left, width) => (width - left - 1) / (range[1] - range[0]);

function drawAxis(left, width, height) {
  const seconds = range[1] - range[0];
  const wanted = seconds / Math.max(2, Math.floor((width - left) / 110));
  const power = 10 ** Math.floor(Math.log10(wanted));
  const tick = [1, 2, 5, 10].map((by) => by * power).find((size) => size >= wanted) ?? wanted;
  pen.fillStyle = colour("muted");
  pen.strokeStyle = colour("line");
  pen.textAlign = "center";
  const words = ticks(tick, seconds);
  for (let before = 0; before <= seconds; before += tick) {
    const x = Math.round(width - 1 - before * scale(left, width)) + 0.5;
    pen.beginPath();
    pen.moveTo(x, TOP);
    pen.lineTo(x, height - AXIS + 4);
    pen.stroke();
    // What has ended is counted from its end.
    const label = before ? `−${words(before)}` : age ? `${duration(age)} ago` : "now";
    const room = pen.measureText(label).width / 2;
    if (x + room <= width && x - room >= left) pen.fillText(label, x, height - AXIS / 2 + 4);
    else if (before === 0) pen.fillText(label, width - room - 1, height - AXIS / 2 + 4);
  }
}

function drawNames(left) {
  const high = rowHeight();
  rows.forEach(({ rank, name }, index) => {
    const middle = TOP + (index + 0.5) * high;
    pen.textAlign = "right";
    pen.fillStyle = colour("text");
    pen.fillText(String(rank), 24, middle);
    pen.textAlign = "left";
    pen.fillStyle = colour("muted");
    pen.fillText(fitted(name, left - 44), 34, middle);
  });
}

/** Where each part of each step is, in whole pixels: what has none is left out. By phase, and the ends of steps. */
function partsOf(left, width) {
  const perSecond = scale(left, width);
  const high = rowHeight();
  const gap = high > 18 ? 3 : 1;
  const parts = new Map(PHASES.map((phase) => [phase, []]));
  const ends = [];
  const unsent = [];
  let mark = null;
  rows.forEach(({ rank, steps }, index) => {
    const y = TOP + index * high + gap;
    let before = null;
    for (const step of steps) {
      const begin = left + (step[1] - range[0]) * perSecond;
      if (before && step[0] > before.number + 1 && begin > before.x) unsent.push([before.x, y, begin - before.x]);
      let [x, from] = [begin, Math.round(begin)];
      for (const phase of PHASES) {
        x += secondsOf(step, phase) * perSecond;
        const to = Math.round(x);
        if (to > from) parts.get(phase).push([from, y, to - from]);
        from = to;
      }
      before = { number: step[0], x };
      if (x - begin > 6) ends.push([from - 1, y, 1]);
      if (chosen && chosen.rank === rank && chosen.number === step[0]) mark = [begin, y, Math.max(2, x - begin)];
    }
  });
  return { parts, ends, unsent, mark, tall: high - 2 * gap };
}

// All parts of one phase after another: a canvas takes long to change what it fills with, above all patterns.
function drawSteps(left, width) {
  const { parts, ends, unsent, mark, tall } = partsOf(left, width);
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, width - left, canvas.height);
  pen.clip();
  drawUnsent(unsent, tall);
  for (const [phase, places] of parts) {
    pen.fillStyle = colour(phase.name);
    for (const [x, y, wide] of places) if (wide < PATTERNED) pen.fillRect(x, y, wide, tall);
    pen.fillStyle = fillOf(pen, phase);
    for (const [x, y, wide] of places) if (wide >= PATTERNED) pen.fillRect(x, y, wide, tall);
  }
  pen.fillStyle = colour("panel");
  for (const [x, y, wide] of ends) pen.fillRect(x, y, wide, tall);
  if (mark) {
    pen.strokeStyle = colour("text");
    pen.lineWidth = 2;
    pen.strokeRect(mark[0], mark[1] - 1, mark[2], tall + 2);
    pen.lineWidth = 1;
  }
  pen.restore();
}

// Steps that were made and not sent. Without a mark they would look like a rank that does nothing.
function drawUnsent(places, tall) {
  byId("timeline-unsent").hidden = !places.length;
  pen.strokeStyle = colour("muted");
  pen.setLineDash([2, 4]);
  for (const [x, y, wide] of places) {
    pen.beginPath();
    pen.moveTo(x, y + tall / 2);
    pen.lineTo(x + wide, y + tall / 2);
    pen.stroke();
  }
  pen.setLineDash([]);
}

function fitted(text, room) {
  if (pen.measureText(text).width <= room) return text;
  for (let most = text.length; most > 1; most -= 1) {
    const shown = shortened(text, most);
    if (pen.measureText(shown).width <= room) return shown;
  }
  return "…";
}

function at(x, y) {
  const row = rows[Math.floor((y - TOP) / rowHeight())];
  const left = margin(room);
  if (!row || x < left) return null;
  const moment = range[0] + (x - left) / scale(left, room);
  const step = row.steps.find((one) => one[1] <= moment && moment < one[1] + lengthOf(one));
  return step ? { rank: row.rank, number: step[0] } : null;
}

function move(event) {
  const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (event.key === "Escape") choose(null);
  if (!by || !rows.length) return;
  event.preventDefault();
  const index = Math.max(0, rows.findIndex(({ rank }) => rank === chosen?.rank));
  const row = rows[Math.min(rows.length - 1, Math.max(0, index + (chosen ? by[0] : 0)))];
  if (!row.steps.length) return;
  let place = row.steps.findIndex((step) => step[0] >= (chosen?.number ?? Infinity));
  if (place < 0) place = row.steps.length - 1;
  else place = Math.min(row.steps.length - 1, Math.max(0, place + by[1]));
  choose({ rank: row.rank, number: row.steps[place][0] });
}

function choose(next) {
  if (chosen?.rank === next?.rank && chosen?.number === next?.number) return;
  chosen = next;
  redraw();
  const row = rows.find(({ rank }) => rank === chosen?.rank);
  const step = row?.steps.find((one) => one[0] === chosen.number);
  setText(byId("timeline-readout"), step ? described(row, step) : "");
}

function described({ rank, name }, step) {
  const length = lengthOf(step);
  const parts = PHASES.filter((phase) => secondsOf(step, phase) > 0.005 * length).map(
    (phase) => `${phase.label} ${brief(secondsOf(step, phase))} (${percent(secondsOf(step, phase) / length)})`,
  );
  return `rank ${rank}${name ? ` on ${name}` : ""}, step ${count(step[0])}, ${brief(length)}: ${parts.join(", ")}`;
}
