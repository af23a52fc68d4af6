// The parts of a step: order, words, and patterns for people who do not see their colours.

import { byId, make } from "./dom.js";
import { colour, onTheme } from "./theme.js";

/** In the order in which they are drawn. A step does not say when each happened, only how long it took. */
export const PHASES = [
  { name: "data", label: "data", says: "Waiting for the data loader" },
  { name: "compute", label: "compute", says: "Computing" },
  { name: "codec", label: "codec", says: "Compressing gradients" },
  { name: "waiting", label: "waiting", says: "Waiting for ranks that come later" },
  { name: "wire", label: "wire", says: "Exchanging gradients, after all have come" },
  { name: "seal", label: "seal", says: "Agreeing that the step counts" },
];

/** The seconds of a step as web/feed.py sends it: [number, start, compute, data, waiting, wire, codec, seal]. */
const PLACES = { compute: 2, data: 3, waiting: 4, wire: 5, codec: 6, seal: 7 };
export const secondsOf = (step, phase) => step[PLACES[phase.name]];
export const lengthOf = (step) => step[2] + step[3] + step[4] + step[5] + step[6] + step[7];

export function startLegend() {
  byId("legend").append(
    ...PHASES.map((phase) =>
      make("li", { title: phase.says }, make("span", { class: `swatch phase ${phase.name}` }), phase.label),
    ),
  );
}

const patterns = new Map();
onTheme(() => patterns.clear());

/** What to fill a phase with on a canvas: the patterns of style.css. */
export function fillOf(context, phase) {
  let fill = patterns.get(phase.name);
  if (!fill) {
    fill = drawn(context, phase.name);
    patterns.set(phase.name, fill);
  }
  return fill;
}

function drawn(context, name) {
  const main = colour(name);
  if (name === "compute" || name === "seal") return main;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.fillStyle = main;
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = pen.fillStyle = colour("pattern");
  pen.lineWidth = 2;
  pen.beginPath();
  if (name === "waiting") {
    for (const x of [-8, 0, 8]) {
      pen.moveTo(x - 1, 9);
      pen.lineTo(x + 9, -1);
    }
  } else if (name === "data") {
    pen.moveTo(2, 0);
    pen.lineTo(2, 8);
  } else if (name === "codec") {
    pen.moveTo(0, 2);
    pen.lineTo(8, 2);
  }
  pen.stroke();
  if (name === "wire") {
    pen.fillRect(1, 1, 2, 2);
    pen.fillRect(5, 5, 2, 2);
  }
  return context.createPattern(tile, "repeat");
}
