// Processor, memory, GPU, temperature and battery of each machine, where its system tells them.

import { byId, keep, make, setAttribute, setText } from "./dom.js";
import { figure, isNumber, percent } from "./format.js";
import { machinesOf } from "./graph.js";

const GIB = 2 ** 30;

/** Each value is {text, below, part, isHigh}: what is said, in small type below it, as a bar, and in another colour. */
const COLUMNS = [
  { name: "Processor", of: ({ cpu }) => part(cpu) },
  { name: "Memory, GiB", of: ({ memory, memory_total: total }) => share(memory, total) },
  { name: "GPU", of: ({ gpu }) => part(gpu) },
  { name: "GPU memory, GiB", of: ({ gpu_memory: used, gpu_memory_total: total }) => share(used, total) },
  { name: "°C", of: ({ temperature: heat }) => isNumber(heat) && { text: figure(heat, 2), isHigh: heat >= 90 } },
  {
    name: "Battery",
    of: ({ battery, plugged }) =>
      isNumber(battery) && {
        text: percent(battery),
        below: plugged === 0 ? "unplugged" : "",
        part: battery,
        isHigh: plugged === 0 && battery < 0.2,
      },
  },
];

function part(value) {
  return isNumber(value) && { text: percent(value), part: value };
}

function share(used, total) {
  if (!isNumber(used)) return null;
  if (!isNumber(total) || total <= 0) return { text: figure(used / GIB, 3) };
  return { text: `${figure(used / GIB, 3)} of ${figure(total / GIB, 3)}`, part: used / total, isHigh: used / total > 0.95 };
}

export function showMachines(state) {
  const machines = machinesOf(state);
  const columns = COLUMNS.filter(({ of }) => machines.some(({ vitals }) => of(vitals)));
  byId("vitals").hidden = !columns.length;
  byId("vitals-empty").hidden = columns.length > 0;
  const head = [{ name: "Machine" }, ...columns];
  keep(
    byId("vitals").tHead.rows[0],
    head,
    ({ name }) => name,
    ({ name }) => make("th", { scope: "col" }, name),
    () => {},
  );
  keep(
    byId("vitals").tBodies[0],
    machines,
    ({ host }) => host,
    () => make("tr"),
    (row, machine) =>
      keep(row, head, ({ name }) => name, createCell, (cell, column) => {
        if (column.of) showCell(cell, column.of(machine.vitals));
        else {
          setText(cell, machine.name);
          setAttribute(cell, "title", machine.name);
        }
      }),
  );
}

function createCell({ of }) {
  if (!of) return make("th", { scope: "row" });
  const parts = ["number", "meter", "below"].map((name) => make("span", { class: name }));
  return make("td", { class: "vital" }, ...parts);
}

function showCell(cell, found) {
  const [text, meter, below] = cell.children;
  setText(text, found ? found.text : "–");
  setText(below, (found && found.below) || "");
  cell.classList.toggle("high", Boolean(found && found.isHigh));
  const hasPart = Boolean(found) && isNumber(found.part);
  meter.hidden = !hasPart;
  if (hasPart) meter.style.setProperty("--part", Math.min(1, Math.max(0, found.part)).toFixed(3));
  setAttribute(meter, "aria-hidden", "true");
}
