// What has happened, newest first.

import { byId, make, setText } from "./dom.js";
import { timeOfDay } from "./format.js";

const BAD = new Set(["lost", "refused", "nonsense", "diverged", "dropped"]);
const GOOD = new Set(["joined", "learner"]);
const MOST = 200;

export function showEvents(state) {
  const events = state.events.slice(-MOST).reverse();
  byId("events-empty").hidden = events.length > 0;
  const list = byId("events");
  // Events do not change, so those that are there are found by what they say.
  const known = new Map([...list.children].map((node) => [node.dataset.key, node]));
  list.replaceChildren(
    ...events.map((event) => {
      const key = `${event.at}|${event.kind}|${event.rank}|${event.text}`;
      return known.get(key) ?? created(event, key);
    }),
  );
}

function created({ at, kind, text, name }, key) {
  const date = new Date(at * 1000);
  const mood = BAD.has(kind) ? "bad" : GOOD.has(kind) ? "good" : "plain";
  const row = make(
    "li",
    { "data-mood": mood },
    make("time", { datetime: Number.isNaN(date.getTime()) ? "" : date.toISOString() }, timeOfDay(at)),
    make("span", { class: "kind" }, kind),
    make("span", { class: "text" }),
    make("span", { class: "who", title: name }, name),
  );
  setText(row.children[2], text);
  row.dataset.key = key;
  return row;
}
