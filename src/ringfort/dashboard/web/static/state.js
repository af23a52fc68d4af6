// What is shown: applies the messages of web/feed.py. Pure.

export function empty() {
  return {
    seq: 0, now: 0, run: "", program: "", verdict: {}, ranks: [], seen: 0, world_size: 0, links: {}, runs: [],
    notice: "", recording: false, playback: null, events: [], curves: {}, timeline: {},
  };
}

export class GapError extends Error {}

/** Returns the state after a message. Throws `GapError` if a message before it is missing. */
export function apply(state, message) {
  if (!message.full && message.seq !== state.seq + 1) throw new GapError(`${message.seq} after ${state.seq}`);
  const next = message.full ? empty() : { ...state };
  for (const [name, value] of Object.entries(message)) {
    if (name === "events") next.events = applyList(next.events, value[""]);
    else if (name === "curves" || name === "timeline") next[name] = applyAll(next[name], value, applyList);
    else if (name === "links") next.links = applyAll(next.links, value, (_, link) => link);
    else if (name !== "full") next[name] = value;
  }
  return next;
}

// Without a prototype: a program may log a value that is called `constructor`.
function applyAll(items, changes, applyOne) {
  const next = Object.assign(Object.create(null), items);
  for (const [key, change] of Object.entries(changes)) {
    if (change === null) delete next[key];
    else next[key] = applyOne(next[key] ?? [], change);
  }
  return next;
}

function applyList(list, { drop, keep, add }) {
  return list.slice(drop, drop + keep).concat(add);
}
