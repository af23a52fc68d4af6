// What the page shows with each request for data, beside the cookie: web/security.py says why.

const NAME = "ringfort-page";

/** Keeps the key in the answer to a link. Returns whether it could. */
export function setKey(answer) {
  try {
    localStorage.setItem(NAME, answer.headers.get(NAME));
    return true;
  } catch {
    return false;
  }
}

/** `fetch` with the key. */
export function ask(path, options = {}) {
  return fetch(path, { ...options, headers: { [NAME]: localStorage.getItem(NAME) ?? "" } });
}
