// Controls of a recording.

import { ask } from "./access.js";
import { byId, make, setAttribute, setText } from "./dom.js";
import { clock } from "./format.js";

const SPEEDS = [0.5, 1, 2, 5, 10, 30, 100];
const HELD = 700; // Milliseconds for which the slider is the person's, not the recording's.

let playing = false;
let heldUntil = 0;

async function wish(what) {
  try {
    await ask("/api/playback", { method: "POST", body: JSON.stringify(what) });
  } catch {
    // The page says that the connection is lost.
  }
}

export function startPlayer() {
  byId("speed").append(...SPEEDS.map((speed) => make("option", { value: speed }, `${speed}×`)));
  byId("play").addEventListener("click", () => wish({ playing: !playing }));
  byId("speed").addEventListener("change", () => wish({ speed: Number(byId("speed").value) }));
  const seek = byId("seek");
  seek.addEventListener("input", () => {
    heldUntil = performance.now() + HELD;
    wish({ position: Number(seek.value) });
  });
  // `step="any"` lets a pointer go anywhere, and then arrow keys have no step of their own.
  seek.addEventListener("keydown", (event) => {
    const seconds = { ArrowLeft: -5, ArrowRight: 5, ArrowDown: -5, ArrowUp: 5, PageDown: -60, PageUp: 60 }[event.key];
    if (seconds === undefined) return;
    event.preventDefault();
    seek.value = String(Number(seek.value) + seconds);
    seek.dispatchEvent(new Event("input"));
  });
}

export function showPlayer(state) {
  const { playback } = state;
  byId("player").hidden = !playback;
  if (!playback) return;
  playing = playback.playing;
  setText(byId("play"), playing ? "Pause" : "Play");
  const seek = byId("seek");
  setAttribute(seek, "max", String(playback.duration));
  if (performance.now() > heldUntil) seek.value = String(playback.position);
  const words = `${clock(playback.position)} / ${clock(playback.duration)}`;
  setText(byId("position"), words);
  setAttribute(seek, "aria-valuetext", `${clock(playback.position)} of ${clock(playback.duration)}`);
  const speed = byId("speed");
  if (document.activeElement !== speed) speed.value = String(playback.speed);
}
