// Exchanges the secret of a one-time link, which is behind the # of the address, for this browser's cookie and key.

import { setKey } from "./access.js";

const secret = location.hash.slice(1);
// It is of no use in the history.
history.replaceState(null, "", "/open");

// A new link that is pasted into this tab changes only what is behind the #, and so loads nothing by itself.
addEventListener("hashchange", () => location.reload());

function fail(title, text) {
  document.getElementById("title").textContent = title;
  document.getElementById("text").textContent = text;
  document.getElementById("help").hidden = false;
}

async function exchange() {
  if (!secret) {
    fail("This link is incomplete", "The part behind the # is missing.");
    return;
  }
  let answer;
  try {
    answer = await fetch("/api/session", { method: "POST", body: JSON.stringify({ link: secret }) });
  } catch {
    fail("No answer", "ringfort dash does not answer. It has probably ended.");
    return;
  }
  if (answer.ok && !setKey(answer)) {
    fail("This browser stores nothing for this page", "Allow it to store data for this address, and open a new link.");
  } else if (answer.ok) location.replace("/");
  else fail("This link does not let you in", await answer.text());
}

exchange();
