// Numbers as people read them. Pure.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const NONE = "–";

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  return isNumber(value) ? whole.format(value) : NONE;
}

/** Three to four digits that matter: 1,830  18.3  0.0183  1.2e-7 */
export function figure(value, digits = 4) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(2);
  if (size >= 1000) return whole.format(value);
  return String(Number(value.toPrecision(digits)));
}

/** Figures beside an axis, with the same number of decimals if that is readable. */
export function figures(values) {
  const sizes = values.map((value) => Math.abs(value)).filter((size) => size > 0);
  if (!sizes.length || Math.max(...sizes) >= 1e4 || Math.min(...sizes) < 1e-3) return values.map((value) => figure(value, 3));
  const decimals = Math.max(...values.map((value) => (String(Number(value.toPrecision(3))).split(".")[1] ?? "").length));
  const shown = new Intl.NumberFormat("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  return values.map((value) => shown.format(value));
}

/** A rate: 1,830  183  18.3  1.83 */
export function rate(value) {
  if (!isNumber(value)) return NONE;
  if (value >= 100) return whole.format(value);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function percent(part) {
  return isNumber(part) ? `${Math.round(100 * part)}%` : NONE;
}

/** The time of a step or a round trip: 850 µs  12.4 ms  1.24 s */
export function brief(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds >= 100) return duration(seconds);
  if (seconds >= 1) return `${seconds.toPrecision(3)} s`;
  if (seconds >= 1e-3) return `${(seconds * 1e3).toPrecision(3)} ms`;
  return `${Math.round(seconds * 1e6)} µs`;
}

/** A long time, in its two largest units: 2 d 3 h, 1 h 12 min, 3 min 20 s, 38 s */
export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  let left = Math.max(0, Math.round(seconds));
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => left >= size);
  if (first < 0) return "0 s";
  const parts = [];
  for (const [name, size] of units.slice(first, first + 2)) {
    const number = Math.floor(left / size);
    left -= number * size;
    if (number || !parts.length) parts.push(`${whole.format(number)} ${name}`);
  }
  return parts.join(" ");
}

/** At most `most` characters as people count them: an emoji is not cut in two. */
export function shortened(text, most) {
  const characters = [...new Intl.Segmenter().segment(text)].map(({ segment }) => segment);
  return characters.length > most ? `${characters.slice(0, most - 1).join("")}…` : text;
}

/** A function for the times of an axis with a tick every `tick` seconds: −1.5 s, −250 ms. All have the same unit. */
export function ticks(tick, longest) {
  const [size, unit] = longest >= 1 ? [1, "s"] : longest >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  const digits = Math.max(0, -Math.floor(Math.log10(tick / size) + 1e-9));
  return (seconds) => `${(seconds / size).toFixed(digits)} ${unit}`;
}

/** A position in a recording: 2:05  1:02:05 */
export function clock(seconds) {
  const total = Math.max(0, Math.floor(isNumber(seconds) ? seconds : 0));
  const [h, m, s] = [Math.floor(total / 3600), Math.floor(total / 60) % 60, total % 60];
  const two = (number) => String(number).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

/** A speed of a link. Bits, as links are sold. */
export function bits(bytesPerSecond) {
  if (!isNumber(bytesPerSecond)) return NONE;
  const value = bytesPerSecond * 8;
  for (const [size, name] of [[1e9, "Gbit/s"], [1e6, "Mbit/s"], [1e3, "kbit/s"]]) {
    if (value >= size * 0.9995) return `${short(value / size)} ${name}`;
  }
  return `${Math.round(value)} bit/s`;
}

/** Two speeds with the unit of the second: 36.8 of 78.4 Mbit/s */
export function bitsOf(used, measured) {
  const [, unit] = bits(measured).split(" ");
  const size = { "Gbit/s": 1e9, "Mbit/s": 1e6, "kbit/s": 1e3 }[unit] ?? 1;
  return `${short((used * 8) / size)} of ${bits(measured)}`;
}

function short(value) {
  return value >= 100 ? String(Math.round(value)) : String(Number(value.toPrecision(3)));
}

/** Ranks as ranges: 0–3, 6 */
export function ranges(numbers) {
  const sorted = [...new Set(numbers)].sort((a, b) => a - b);
  const parts = [];
  for (let i = 0; i < sorted.length; ) {
    let j = i;
    while (sorted[j + 1] === sorted[j] + 1) j += 1;
    parts.push(i === j ? `${sorted[i]}` : `${sorted[i]}–${sorted[j]}`);
    i = j + 1;
  }
  return parts.join(", ");
}

/** A moment by the viewer's clock, such as 14:03:22. */
export function timeOfDay(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}
