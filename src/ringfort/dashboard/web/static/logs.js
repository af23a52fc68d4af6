// The output of one rank. It is asked for only while it can be seen.

import { ask as request } from "./access.js";
import { byId, setOptions, setText } from "./dom.js";
import { rankName } from "./ranks.js";

const EVERY = 1_000; // Milliseconds. More of a log comes once a second.

let isSeen = false;
let run = "";
let question = 0;

export function startLogs() {
  new IntersectionObserver((entries) => {
    isSeen = entries.at(-1).isIntersecting;
    if (isSeen) ask();
  }).observe(byId("log"));
  byId("log-rank").addEventListener("change", () => {
    setText(byId("log"), "");
    ask();
  });
  setInterval(() => isSeen && document.visibilityState === "visible" && ask(), EVERY);
}

/** Goes to the output of a rank. */
export function openLog(rank) {
  const select = byId("log-rank");
  if (select.value !== rank) {
    select.value = rank;
    select.dispatchEvent(new Event("change"));
  }
  byId("output-panel").scrollIntoView({ block: "nearest" });
  byId("log").focus({ preventScroll: true });
}

export function showLogRanks(state) {
  run = state.run;
  const ranks = new Map();
  for (const rank of state.ranks) if (rank.rank >= 0) ranks.set(rank.rank, `${rankName(rank)} on ${rank.name || "unknown"}`);
  setOptions(byId("log-rank"), [...ranks].sort(([a], [b]) => a - b));
}

async function ask() {
  const rank = byId("log-rank").value;
  if (rank === "") return;
  question += 1;
  const mine = question;
  const query = new URLSearchParams({ rank, ...(run ? { run } : {}) });
  let lines;
  try {
    const answer = await request(`/api/log?${query}`);
    if (!answer.ok) return; // the page says why: it has lost its connection or its access
    ({ lines } = await answer.json());
  } catch {
    return;
  }
  if (mine !== question) return;
  const box = byId("log");
  const before = box.scrollTop;
  setText(box, lines.length ? lines.join("\n") : "No output of this rank is known. It is kept of ranks that ringfort run starts.");
  box.scrollTop = byId("log-follow").checked ? box.scrollHeight : before;
}
