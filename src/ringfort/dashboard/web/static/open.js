// Exchanges the secret of a one-time link, which is behind the # of the address, for this browser's cookie.

const secret = location.hash.slice(1);
// It is of no use in the history.
history.replaceState(null, "", "/open");

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
  if (answer.ok) location.replace("/");
  else fail("This link does not let you in", await answer.text());
}

exchange();
