// Loss and throughput, by uPlot.

import { byId, setAttribute, setOptions, setText } from "./dom.js";
import { count, figure, figures, rate, timeOfDay } from "./format.js";
import { colour, onTheme } from "./theme.js";
import uPlot from "./uplot/uPlot.esm.js";

const SPEEDS = ["samples/s", "steps/s"];
const HEIGHT = 190;

class Chart {
  #plot = null;
  #curve = null;
  #kept = ""; // What the plot was made for.

  /** The axis of a rate begins at 0: else small changes look large. */
  constructor(name, format, isRate = false) {
    this.isRate = isRate;
    this.box = byId(`${name}-chart`);
    this.readout = byId(`${name}-readout`);
    this.empty = byId(`${name}-empty`);
    this.format = format;
    this.wish = { over: "time", logarithmic: false };
    new ResizeObserver(() => this.#resize()).observe(this.box);
    onTheme(() => {
      this.#kept = "";
      if (this.#curve) this.show(this.#curve.name, this.#curve.points);
    });
    this.box.addEventListener("keydown", (event) => this.#move(event));
    this.box.addEventListener("blur", () => this.#plot?.setCursor({ left: -10, top: -10 }));
  }

  /** Shows a curve: [[at, step, value], ...]. */
  show(name, points) {
    this.#curve = { name, points };
    this.empty.hidden = points.length > 0;
    this.box.hidden = !points.length;
    const over = this.wish.over === "step" ? 1 : 0;
    // Steps may repeat where a run went back to a checkpoint; an axis cannot.
    const usable = over ? points.filter((point, index) => index === 0 || point[1] > points[index - 1][1]) : points;
    const isLogarithmic = this.wish.logarithmic && usable.some((point) => point[2] > 0);
    const values = usable.map((point) => (isLogarithmic && !(point[2] > 0) ? null : point[2]));
    const data = [usable.map((point) => point[over]), values, smoothed(values)];
    const kind = `${name}|${over}|${isLogarithmic}`;
    if (kind === this.#kept) this.#plot.setData(data);
    else {
      this.#plot?.destroy();
      this.#plot = new uPlot(this.#options(over, isLogarithmic), data, this.box);
      this.#kept = kind;
    }
    this.#say();
    const last = points.at(-1);
    setAttribute(
      this.box,
      "aria-label",
      `${name}: ${last ? `${this.format(last[2])} at step ${count(last[1])}` : "no value yet"}. Arrow keys move along it.`,
    );
  }

  #options(over, isLogarithmic) {
    const axis = {
      stroke: colour("muted"),
      grid: { stroke: colour("line"), width: 1 },
      ticks: { show: false },
      font: `12px ${getComputedStyle(this.box).fontFamily}`,
    };
    const accent = colour("accent");
    return {
      ...this.#size(),
      legend: { show: false },
      padding: [10, 20, 0, 0],
      cursor: { y: false, drag: { x: true, y: false }, points: { size: 8, fill: accent } },
      scales: { x: { time: !over }, y: { distr: isLogarithmic ? 3 : 1, ...(this.isRate ? { range: (_, __, most) => [0, (most || 1) * 1.1] } : {}) } },
      axes: [
        { ...axis, size: 34, gap: 9, space: 70, ...(over ? { values: (_, ticks) => ticks.map((tick) => count(tick)) } : { values: times }) },
        { ...axis, size: 54, values: (_, ticks) => marks(ticks) },
      ],
      series: [
        {},
        { stroke: faded(accent, 0.35), width: 1, points: { show: false } },
        { stroke: accent, width: 2, points: { show: false } },
      ],
      hooks: { setCursor: [() => this.#say()] },
    };
  }

  #size() {
    return { width: Math.max(160, this.box.clientWidth), height: HEIGHT };
  }

  #resize() {
    const size = this.#size();
    if (this.#plot && this.#plot.width !== size.width) this.#plot.setSize(size);
  }

  #say() {
    const index = this.#plot?.cursor.idx;
    const point = index === null || index === undefined ? null : this.#shown(index);
    setText(this.readout, point ? `${this.format(point[2])} at step ${count(point[1])}, ${timeOfDay(point[0])}` : "");
  }

  #shown(index) {
    const x = this.#plot.data[0][index];
    const over = this.wish.over === "step" ? 1 : 0;
    return this.#curve.points.find((point) => point[over] === x);
  }

  #move(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity, PageUp: -20, PageDown: 20 }[event.key];
    const plot = this.#plot;
    if (event.key === "Escape") plot?.setCursor({ left: -10, top: -10 });
    if (by === undefined || !plot?.data[0].length) return;
    event.preventDefault();
    const last = plot.data[0].length - 1;
    const from = plot.cursor.idx ?? last + (by < 0 ? 1 : 0);
    const index = Math.min(last, Math.max(0, from + by));
    plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: 10 });
  }
}

const faded = (text, by) => text.replace("rgb(", "rgba(").replace(")", `, ${by})`);

// The mean of neighbours, drawn over the values themselves: a fortieth of the curve to each side.
function smoothed(values) {
  const reach = Math.ceil(values.length / 40);
  const sums = [[0, 0]];
  for (const value of values) {
    const [sum, number] = sums.at(-1);
    sums.push(value === null ? [sum, number] : [sum + value, number + 1]);
  }
  return values.map((value, index) => {
    const [before, after] = [sums[Math.max(0, index - reach)], sums[Math.min(values.length, index + reach + 1)]];
    return value === null ? null : (after[0] - before[0]) / (after[1] - before[1]);
  });
}

// A logarithmic axis leaves some out.
function marks(ticks) {
  const shown = figures(ticks.filter((tick) => tick !== null));
  return ticks.map((tick) => (tick === null ? "" : shown.shift()));
}

// By the length of what is shown: seconds for minutes, days for days.
function times(plot, ticks) {
  const [first, last] = [plot.scales.x.min, plot.scales.x.max];
  const isLong = last - first > 86400;
  const isShort = last - first < 300;
  return ticks.map((tick) => {
    const date = new Date(tick * 1000);
    const time = date.toLocaleTimeString("en-GB", {
      hour: "2-digit", minute: "2-digit", ...(isShort ? { second: "2-digit" } : {}),
    });
    return isLong ? `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}` : time;
  });
}

let value;
let speed;
let latest = null;

export function startCurves() {
  value = new Chart("value", (number) => figure(number));
  speed = new Chart("rate", rate, true);
  const again = () => {
    for (const chart of [value, speed]) chart.wish = { ...chart.wish, over: byId("over").value };
    value.wish.logarithmic = byId("logarithmic").checked;
    if (latest) showCurves(latest);
  };
  for (const id of ["over", "logarithmic", "value"]) byId(id).addEventListener("change", again);
}

export function showCurves(state) {
  latest = state;
  const names = Object.keys(state.curves).filter((name) => !SPEEDS.includes(name));
  names.sort((a, b) => (b === "loss") - (a === "loss") || a.localeCompare(b));
  const select = byId("value");
  setOptions(select, names.map((name) => [name, name]));
  byId("value-field").hidden = names.length < 2;
  const name = names.includes(select.value) ? select.value : (names[0] ?? "loss");
  setText(byId("value-title"), name);
  value.show(name, state.curves[name] ?? []);
  const unit = SPEEDS.find((one) => state.curves[one]) ?? SPEEDS[0];
  setText(byId("rate-title"), unit);
  speed.show(unit, state.curves[unit] ?? []);
}
