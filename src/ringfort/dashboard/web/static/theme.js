// Light, dark, or as the system says; and colours for what is drawn rather than styled.

import { byId } from "./dom.js";

const listeners = [];
const cache = new Map();
const probe = document.createElement("span");

/** Calls `listener` when colours change. */
export function onTheme(listener) {
  listeners.push(listener);
}

/** The value of a colour variable of style.css, for a canvas. */
export function colour(name) {
  let found = cache.get(name);
  if (!found) {
    if (!probe.isConnected) {
      probe.hidden = true;
      document.body.append(probe);
    }
    probe.style.color = `var(--${name})`;
    found = getComputedStyle(probe).color;
    cache.set(name, found);
  }
  return found;
}

function changed() {
  cache.clear();
  for (const listener of listeners) listener();
}

export function startTheme() {
  const select = byId("theme");
  select.value = document.documentElement.dataset.theme ?? "system";
  select.addEventListener("change", () => {
    const theme = select.value;
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("ringfort-theme", theme);
    } catch {
      // It lasts until the page is closed.
    }
    changed();
  });
  for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)"]) {
    matchMedia(query).addEventListener("change", changed);
  }
}
