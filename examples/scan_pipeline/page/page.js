// Starts scans and shows how they go on. What was shown, and how far that is, is in sessionStorage.

import { follow, offset } from "./follow.js";

const STAGES = ["vision", "rule", "answer", "reward", "done"];
// A browser has six connections to a server, over HTTP/1.1; one is kept for questions.
const LINES = 5;
const GATEWAY = document.querySelector("meta[name=gateway]").content;

const scans = new Map();
const following = new Map();

// What was applied to each scan, in that order: for whoever wants to check.
window.applied = {};

// --- one scan -----------------------------------------------------------------------------------

function made(id, picture) {
  return {
    id, picture,
    isSent: false,
    life: "waits",
    cursor: null,
    attempt: 1,
    last: null, // of whom we heard last: a worker, at a stage
    stages: {}, // by name, the latest attempt's latest event
    story: [],
    applied: [],
  };
}

function apply(scan, event, cursor) {
  const { stage, seq, attempt, data } = event;
  const { note = "", worker = null } = data ?? {};
  if (attempt > scan.attempt) {
    const died = scan.last ? `${scan.last.worker} died at ${scan.last.stage}: ` : "";
    tell(scan, cursor, "takeover", `${died}${worker} takes over, as attempt ${attempt}`);
    scan.attempt = attempt;
  }
  if (worker !== null) scan.last = { worker, stage };
  const held = scan.stages[stage];
  if (!held || attempt > held.attempt || (attempt === held.attempt && seq > held.seq)) {
    scan.stages[stage] = { attempt, seq };
  }
  scan.life = stage === "failed" ? "failed" : stage === "done" ? "done" : worker ?? "waits";
  tell(scan, cursor, "event", `${worker ? worker + " " : ""}${note}`, stage);
  scan.cursor = cursor;
  scan.applied.push(cursor);
}

function reset(scan, state, cursor, reason) {
  scan.stages = {};
  for (const { stage, seq, attempt, data } of Object.values(state.stages)) {
    scan.stages[stage] = { attempt, seq };
    scan.attempt = Math.max(scan.attempt, attempt);
    if (data?.worker) scan.last = { worker: data.worker, stage };
  }
  if (scan.stages.failed) scan.life = "failed";
  tell(scan, cursor, "reset", `something is missing here (${reason}): this is how it stands`);
  scan.cursor = cursor;
  scan.applied.push(`reset ${cursor}`);
}

function tell(scan, cursor, kind, text, stage = "") {
  scan.story.push({ offset: offset(cursor), kind, text, stage });
}

// --- keeping and following ----------------------------------------------------------------------

// Everything about a scan in one write: what was shown and the cursor cannot come apart.
function keep(scan) {
  sessionStorage.setItem(`scan:${scan.id}`, JSON.stringify(scan));
  window.applied[scan.id] = scan.applied;
  draw(scan);
}

function kept() {
  const names = Object.keys(sessionStorage).filter((name) => name.startsWith("scan:"));
  return names
    .map((name) => JSON.parse(sessionStorage.getItem(name)))
    .sort((one, other) => one.startedAt - other.startedAt);
}

function isOver(scan) {
  return ["done", "failed", "gone"].includes(scan.life);
}

function followMore() {
  for (const scan of scans.values()) {
    if (isOver(scan) || !scan.isSent || following.has(scan.id)) continue;
    if (following.size < LINES) followOne(scan);
    else line(scan, "waits for a connection");
  }
}

function followOne(scan) {
  const url = `${GATEWAY}/${encodeURIComponent(scan.id)}`;
  const heard = {
    event: (event, cursor) => (apply(scan, event, cursor), keep(scan)),
    reset: (state, cursor, reason) => (reset(scan, state, cursor, reason), keep(scan)),
    passed: (cursor) => ((scan.cursor = cursor), keep(scan)),
    line: (words) => line(scan, words),
    end(life) {
      if (!isOver(scan)) scan.life = life === "gone" ? "gone" : "done";
      following.delete(scan.id);
      keep(scan);
      line(scan, "");
      say(`The ${scan.picture} ${scan.id}: ${scan.life}.`);
      followMore();
    },
  };
  following.set(scan.id, follow(url, scan.cursor, heard));
}

async function send(scan) {
  for (let tries = 0; !scan.isSent; tries++) {
    try {
      const answer = await fetch(`/scans/${encodeURIComponent(scan.id)}`, {
        method: "PUT",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ picture: scan.picture }),
      });
      scan.isSent = answer.ok;
    } catch {
      // Sent again, under the same id: it is started once.
    }
    if (!scan.isSent) await new Promise((done) => setTimeout(done, Math.min(500 * 2 ** tries, 8_000)));
  }
  keep(scan);
  followMore();
}

function start(picture) {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(5)), (byte) =>
    byte.toString(16).padStart(2, "0")).join("");
  const scan = { ...made(id, picture), startedAt: Date.now() + scans.size / 1000 };
  scans.set(id, scan);
  keep(scan);
  send(scan);
}

// --- showing ------------------------------------------------------------------------------------

function cardOf(scan) {
  const found = document.getElementById(`scan-${scan.id}`);
  if (found) return found;
  const card = document.getElementById("scan").content.firstElementChild.cloneNode(true);
  card.id = `scan-${scan.id}`;
  card.querySelector("h2 span").textContent = scan.picture;
  card.querySelector("h2 small").textContent = scan.id;
  card.querySelector(".kill").onclick = () => kill(`/workers/${scan.last.worker}`, scan.last.worker);
  document.getElementById("scans").prepend(card);
  return card;
}

function draw(scan) {
  const card = cardOf(scan);
  const furthest = Math.max(-1, ...Object.keys(scan.stages).map((name) => STAGES.indexOf(name)));
  card.dataset.offset = offset(scan.cursor);
  card.dataset.life = scan.life;
  card.classList.toggle("failed", scan.life === "failed");
  card.querySelector(".life").textContent =
    isOver(scan) || scan.life === "waits" ? scan.life : `attempt ${scan.attempt}, ${scan.life}`;
  card.querySelector(".kill").disabled = isOver(scan) || scan.last === null;
  for (const item of card.querySelectorAll(".stages li")) {
    const place = STAGES.indexOf(item.dataset.stage);
    const isNow = place === furthest && scan.life !== "done";
    item.className = isNow ? "now" : place <= furthest ? "past" : "";
    item.toggleAttribute("aria-current", isNow);
  }
  drawStory(card.querySelector(".story"), scan.story);
}

function drawStory(list, story) {
  for (const { offset: number, kind, text, stage } of story.slice(list.children.length)) {
    const item = document.createElement("li");
    item.value = number;
    item.className = kind;
    if (stage) item.append(Object.assign(document.createElement("b"), { textContent: stage }), " ");
    item.append(text);
    list.append(item);
    if (kind !== "event") say(text);
  }
  list.scrollTop = list.scrollHeight;
}

function line(scan, words) {
  cardOf(scan).querySelector(".line").textContent = words;
}

function say(words) {
  document.getElementById("said").textContent = words;
}

// --- buttons ------------------------------------------------------------------------------------

async function kill(path, name) {
  const answer = await fetch(path, { method: "DELETE" }).catch(() => null);
  say(answer?.ok ? `${name} was killed.` : `${name} is not there any more.`);
}

const chosen = () => document.getElementById("picture").value;

document.getElementById("start").onsubmit = (event) => {
  event.preventDefault();
  start(chosen());
};
document.getElementById("five").onclick = () => {
  for (let i = 0; i < 5; i++) start(chosen());
};
document.getElementById("kill-gateway").onclick = () => kill("/gateway", "The gateway");
document.getElementById("clear").onclick = () => {
  for (const scan of [...scans.values()].filter(isOver)) {
    scans.delete(scan.id);
    sessionStorage.removeItem(`scan:${scan.id}`);
    document.getElementById(`scan-${scan.id}`).remove();
  }
};

for (const scan of kept()) {
  scans.set(scan.id, scan);
  keep(scan);
  if (!scan.isSent) send(scan);
}
followMore();
