// The connection to `ringfort dash`. It recovers by itself: after sleep, a restart, or a night.

import { ask } from "./access.js";
import { apply, empty, GapError } from "./state.js";

const SILENCE = 8_000; // Milliseconds without a message after which a connection is taken for dead: two come a second.
const FIRST_RETRY = 500;
const LAST_RETRY = 8_000;

export class Stream {
  #source = null;
  #state = empty();
  #heardAt = 0;
  #retry = FIRST_RETRY;
  #timer = 0;
  #attempt = 0;
  #run = null;

  /** `onView(state, names of the sections that changed)`; `onStatus("live" | "lost" | "closed" | "connecting")`. */
  constructor(onView, onStatus) {
    this.onView = onView;
    this.onStatus = onStatus;
    setInterval(() => this.#check(SILENCE), 2_000);
    const wake = () => document.visibilityState === "visible" && this.#check(2_500);
    for (const name of ["visibilitychange", "pageshow", "online", "focus"]) window.addEventListener(name, wake);
    document.addEventListener("visibilitychange", wake);
  }

  get run() {
    return this.#run;
  }

  /** Shows a run; null for the one in which most happens. */
  open(run) {
    this.#run = run;
    this.#connect();
  }

  #connect() {
    clearTimeout(this.#timer);
    this.#source?.abort();
    this.#attempt += 1;
    this.#heardAt = Date.now();
    const source = new AbortController();
    this.#source = source;
    this.#read(`/api/events${this.#run ? `?run=${encodeURIComponent(this.#run)}` : ""}`, source);
  }

  async #read(path, source) {
    for await (const data of messages(path, source.signal)) {
      if (source !== this.#source) return;
      this.#take(data);
    }
    if (source === this.#source) this.#failed();
  }

  #take(data) {
    this.#heardAt = Date.now();
    this.#retry = FIRST_RETRY;
    const message = JSON.parse(data);
    try {
      this.#state = apply(this.#state, message);
    } catch (error) {
      if (!(error instanceof GapError)) throw error;
      this.#connect(); // which begins with everything
      return;
    }
    this.onStatus("live");
    const changed = new Set(message.full ? Object.keys(this.#state) : Object.keys(message));
    this.onView(this.#state, changed);
  }

  // A connection that says nothing: the machine slept, or the network changed.
  #check(silence) {
    if (this.#source && Date.now() - this.#heardAt > silence) {
      this.onStatus("connecting");
      this.#connect();
    }
  }

  // Ask why, and try again.
  async #failed() {
    this.#source.abort();
    this.#source = null;
    const attempt = this.#attempt;
    let status = "lost";
    try {
      const answer = await ask("/api/session");
      if (answer.status === 401) status = "closed";
      else if (answer.ok) status = "connecting";
    } catch {
      // Nobody answers.
    }
    if (attempt !== this.#attempt) return;
    this.onStatus(status);
    this.#timer = setTimeout(() => this.#connect(), this.#retry);
    this.#retry = Math.min(LAST_RETRY, this.#retry * 2);
  }
}

/** The data of server-sent events, until the connection ends. The browser's own EventSource cannot send a header. */
async function* messages(path, signal) {
  try {
    const answer = await ask(path, { signal });
    if (!answer.ok) return;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const events = (text + part.value).split("\n\n");
      text = events.pop();
      for (const event of events) if (event.startsWith("data: ")) yield event.slice("data: ".length);
    }
  } catch {
    // Nobody answers, or the connection was lost or given up.
  }
}
