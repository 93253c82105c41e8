// Follows one job: each event once, in order, or a reset where that cannot be.
//
// The browser's EventSource reconnects by itself and sends the last id that it saw. The rest is
// here: an event counts when its offset follows the last one's; an older one was seen; one that
// leaves a hole is asked for again, from the cursor. `heard.event`, `heard.reset` and `heard.passed`
// keep what they did and the cursor in one write, so that a page that is loaded again goes on behind
// it.

const AGAIN_MS = 500;
const LONGEST_MS = 8_000;
// The gateway says something at least every 15 seconds; who hears nothing is connected to nobody.
const SILENCE_MS = 45_000;

export function follow(url, cursor, heard) {
  let source = null;
  let timer = null;
  let failures = 0;
  let behind = null;
  let over = false;

  function open() {
    clearTimeout(timer);
    source?.close();
    source = new EventSource(cursor === null ? url : `${url}?after=${cursor}`);
    listen(source);
    silent();
  }

  function listen(to) {
    const on = (name, take) =>
      to.addEventListener(name, (event) => {
        if (to !== source || over) return; // one that was given up has nothing to say
        failures = 0;
        silent();
        take(event);
      });
    on("open", () => heard.line("live"));
    on("hello", () => {});
    on("message", ({ data, lastEventId }) => {
      if (offset(lastEventId) <= offset(cursor)) return;
      if (offset(lastEventId) > offset(cursor) + 1) return hole();
      cursor = lastEventId;
      heard.event(JSON.parse(data), cursor);
    });
    on("reset", ({ data, lastEventId }) => {
      cursor = lastEventId;
      const { state, reason } = JSON.parse(data);
      heard.reset(state, cursor, reason);
    });
    on("head", ({ data, lastEventId }) => {
      const { head } = JSON.parse(data);
      // With an id of its own it stands for an event that is not for this viewer.
      if (lastEventId === head && offset(head) === offset(cursor) + 1) heard.passed((cursor = head));
      if (offset(head) <= offset(cursor)) behind = null;
      else if (behind === cursor) open(); // said twice, and nothing came in between
      else behind = cursor;
    });
    on("end", ({ lastEventId }) => (offset(lastEventId) > offset(cursor) ? hole() : end()));
    to.onerror = () => {
      if (to !== source || over) return;
      heard.line("reconnecting");
      // Closed for good: 204, 404, a proxy's 502. It is not told which.
      if (to.readyState === EventSource.CLOSED) ask();
    };
  }

  function hole() {
    source.close();
    again();
  }

  async function ask() {
    clearTimeout(timer);
    try {
      const answer = await fetch(url, { headers: { Accept: "application/json" } });
      if (over) return;
      if (answer.status === 410) return end("gone");
      if (answer.status === 404) heard.line("nobody has heard of it yet");
      if (answer.ok) {
        const { life, position } = await answer.json();
        if (life === "ended" && position === cursor) return end();
      }
    } catch {
      // The network is away: so is the answer.
    }
    again();
  }

  function again() {
    if (over) return;
    const most = Math.min(AGAIN_MS * 2 ** failures++, LONGEST_MS);
    timer = setTimeout(open, most * (0.5 + Math.random() / 2)); // not all pages at once
  }

  function silent() {
    clearTimeout(timer);
    timer = setTimeout(open, SILENCE_MS);
  }

  function close() {
    over = true;
    clearTimeout(timer);
    source?.close();
  }

  function end(life = "ended") {
    close();
    heard.end(life);
  }

  open();
  return { close };
}

// A cursor is an offset, a dot, and a tag that only the gateway reads.
export function offset(cursor) {
  return cursor === null ? 0 : parseInt(cursor, 10);
}
