/**
 * How a client follows a feed: bytes and time in, events and what to do next out.
 *
 * `Follower.next` says what to do: connect, read, hand an event over, stop. Whoever does it tells
 * how it went: `opened`, `received`, `closed`, `timedOut`. Nothing here waits, sends or guesses, so
 * the Python client (feed_rules.py) is the same; clients/vectors/feed holds both to it.
 *
 * Its promise: what is handed over is each entry once, in order, or a reset where that cannot be.
 * The cursor moves with a whole event, and nothing else. Offsets are numbers that follow one
 * another: one that is not larger was seen; one that leaves a hole is not handed over, and asked
 * for again. That holds for entries that are hidden from this viewer, too: they have a number, and
 * no data.
 */
import { Frames, TooLargeError } from "./frames.js";
/** The feed cannot be followed, and asking again is no use. */
export class FeedError extends Error {
    status;
    detail;
    name = "FeedError";
    constructor(message, 
    /** The server's answer, null when what is wrong came later. */
    status = null, 
    /** What the server said. */
    detail = "") {
        super(message);
        this.status = status;
        this.detail = detail;
    }
}
export const TERMS = {
    silenceMs: 45_000,
    graceMs: 5_000,
    backoffMs: 1_000,
    longestMs: 30_000,
    limit: 8 * 1024 * 1024,
};
// A server that asks to be asked at once does not mean a thousand times a second.
const SHORTEST_MS = 100;
// Who is told to come back in a year looks again after ten minutes.
const LONGEST_ASKED_MS = 600_000;
// 2 ** 53: larger whole numbers are not what they seem here.
const LARGEST_OFFSET = "9007199254740992";
// Told so, by a proxy or a gateway: not now. 429 and 503 may say when.
const PASSING = new Set([408, 425, 429]);
export class Follower {
    position;
    #terms;
    #chance;
    #lastSeq;
    #baseMs;
    #failures = 0;
    #rushed = false;
    #head = null;
    #behindSince = null;
    #openedAt = null;
    #frames;
    #over = null;
    #connect = null;
    /** `chance` gives a number from 0 to 1, new for every pause. */
    constructor(terms, chance, after = null, lastSeq = null) {
        this.position = after;
        this.#terms = terms;
        this.#chance = chance;
        this.#lastSeq = lastSeq;
        this.#baseMs = between(SHORTEST_MS, terms.backoffMs, terms.longestMs);
        this.#frames = new Frames(terms.limit);
        this.#connectAfter(0, "begin");
    }
    get cursor() {
        return this.position === null ? null : printed(this.position);
    }
    get isOver() {
        return this.#over !== null;
    }
    // --- what to do next --------------------------------------------------------------------------
    next(now) {
        try {
            while (this.#over === null && this.#connect === null) {
                const frame = this.#frames.next();
                this.#heed(this.#frames.retryMs);
                if (frame === null)
                    return this.#reading(now);
                const event = this.#taken(frame, now);
                if (event !== null)
                    return { step: "deliver", event };
            }
        }
        catch (error) {
            if (!(error instanceof TooLargeError))
                throw error;
            this.#fail(`an event is larger than ${this.#terms.limit} bytes: allow more (limit)`);
        }
        const step = this.#over ?? this.#connect;
        if (step === null)
            throw new Error("nothing to do");
        return step;
    }
    #heed(retryMs) {
        if (retryMs !== null)
            this.#baseMs = between(SHORTEST_MS, retryMs, this.#terms.longestMs);
    }
    #reading(now) {
        // What is on its way is not missing, however slowly it comes.
        if (!(this.#isBehind() && this.#frames.isBetween)) {
            this.#behindSince = null;
            return { step: "read", withinMs: this.#terms.silenceMs };
        }
        // Counted from here: the time that the user took for the last event was not the server's.
        this.#behindSince ??= now;
        const leftMs = this.#behindSince + this.#terms.graceMs - now;
        return { step: "read", withinMs: between(0, leftMs, this.#terms.silenceMs) };
    }
    #isBehind() {
        if (this.#head === null || this.position === null)
            return false;
        return this.#head.offset > this.position.offset;
    }
    // --- how it went ------------------------------------------------------------------------------
    opened(now, answer) {
        if (this.#over !== null)
            return;
        const { status, mediaType } = answer;
        if (status === 200 && mediaType === "text/event-stream") {
            this.#connect = null;
            this.#openedAt = now;
        }
        else if (status === 204) {
            this.stop();
        }
        else if (PASSING.has(status) || status >= 500) {
            this.#turnedAway(now, answer);
        }
        else if (status === 200) {
            this.#fail(`the answer is ${mediaType || "nothing known"}, not a feed`, answer);
        }
        else {
            this.#fail(`the server answered ${status}`, answer);
        }
    }
    received(chunk) {
        this.#frames.feed(chunk);
    }
    /** The connection is over, or there is none: cut, ended, refused. */
    closed(now) {
        this.#again(now, "ended");
    }
    /** What was asked for did not come in the time that was given. */
    timedOut(now) {
        this.#again(now, this.#behindSince === null ? "silence" : "behind");
    }
    stop() {
        this.#over = { step: "over", error: null };
    }
    // --- frames -----------------------------------------------------------------------------------
    #taken(frame, now) {
        const position = parsed(frame.id);
        switch (frame.data === null ? "head" : frame.event) {
            case "message":
                return this.#message(frame, position, now);
            case "reset":
                return this.#reset(frame, position);
            case "end":
                this.#end(frame, position, now);
                return null;
            default:
                this.#heard(frame, position, now);
                return null;
        }
    }
    #message(frame, position, now) {
        const data = json(frame.data);
        if (position === null || data === undefined) {
            this.#fail(`an event that is none of a feed, with the id ${JSON.stringify(frame.id)}`);
        }
        else if (this.position === null || position.offset === this.position.offset + 1) {
            this.#move(position);
            return { type: "update", position, id: printed(position), data };
        }
        else if (position.offset > this.position.offset) {
            this.#again(now, "gap");
        }
        return null;
    }
    #reset(frame, from) {
        const said = mapping(frame.data);
        const position = from ?? parsed(said["position"]);
        if (position === null || !("state" in said)) {
            this.#fail(`a reset that is none, with the id ${JSON.stringify(frame.id)}`);
            return null;
        }
        this.#move(position);
        this.#head = null;
        this.#lastSeq = null; // what was seen before is over
        const reason = typeof said["reason"] === "string" ? said["reason"] : "";
        return { type: "reset", position, id: printed(position), state: said["state"], reason };
    }
    #end(frame, from, now) {
        const position = from ?? parsed(mapping(frame.data)["position"]);
        if (this.position === null) {
            this.position = position;
        }
        else if (position !== null && position.offset > this.position.offset) {
            this.#again(now, "gap");
            return;
        }
        this.stop();
    }
    /** Nothing for the user. With an id, it stands for an entry that is not for this viewer. */
    #heard(frame, position, now) {
        const head = parsed(mapping(frame.data)["head"]);
        if (head !== null && (frame.event === "hello" || frame.event === "head"))
            this.#head = head;
        if (position === null)
            return;
        if (this.position === null) {
            this.position = position;
        }
        else if (frame.event === "hello") {
            // It says from where it goes on; who has a position waits for what follows it.
        }
        else if (position.offset === this.position.offset + 1) {
            this.#move(position);
        }
        else if (position.offset > this.position.offset) {
            this.#again(now, "gap");
        }
    }
    #move(position) {
        this.position = position;
        this.#failures = 0;
        this.#rushed = false;
        this.#behindSince = null;
    }
    // --- connecting again -------------------------------------------------------------------------
    #again(now, why) {
        const livedMs = this.#openedAt === null ? 0 : now - this.#openedAt;
        // Servers close what has been open for long: that is no failure.
        if (livedMs >= this.#terms.longestMs)
            this.#failures = 0;
        if ((why === "gap" || why === "behind") && !this.#rushed) {
            this.#rushed = true;
            this.#connectAfter(0, why);
        }
        else {
            this.#connectAfter(this.#pauseMs(), why);
        }
    }
    #turnedAway(now, answer) {
        if (!answer.retryAfterMs) {
            this.#again(now, "ended");
            return;
        }
        // Nobody comes sooner than told, and not all together.
        const askedMs = Math.min(answer.retryAfterMs, LONGEST_ASKED_MS);
        this.#connectAfter(askedMs + this.#chance() * this.#baseMs, "told");
    }
    /** Anything from half the server's own pause up to it, doubled with every failure. */
    #pauseMs() {
        const doubled = this.#baseMs * 2 ** Math.min(this.#failures, 30);
        this.#failures += 1;
        const least = this.#baseMs / 2;
        return least + this.#chance() * (Math.min(doubled, this.#terms.longestMs) - least);
    }
    #connectAfter(afterMs, why) {
        if (this.#over !== null)
            return;
        this.#frames = new Frames(this.#terms.limit);
        this.#openedAt = null;
        this.#behindSince = null;
        const lastSeq = this.#lastSeq;
        const withinMs = this.#terms.silenceMs;
        this.#connect = { step: "connect", afterMs, withinMs, cursor: this.cursor, lastSeq, why };
    }
    #fail(message, answer = null) {
        const detail = answer?.detail ?? "";
        const said = detail === "" ? message : `${message}: ${detail}`;
        this.#over ??= { step: "over", error: new FeedError(said, answer?.status ?? null, detail) };
    }
}
// --- reading ------------------------------------------------------------------------------------
/** The position that was printed so; null for anything else. */
export function parsed(text) {
    const found = typeof text === "string" ? /^(0|[1-9][0-9]{0,15})\.([0-9a-f]{12})$/.exec(text) : null;
    const [, offset, tag] = found ?? [];
    if (offset === undefined || tag === undefined)
        return null;
    const isTooLarge = offset.length === LARGEST_OFFSET.length && offset > LARGEST_OFFSET;
    return isTooLarge ? null : { offset: Number(offset), tag };
}
export function printed(position) {
    return `${position.offset}.${position.tag}`;
}
/** Undefined for what is no JSON. */
function json(text) {
    try {
        return JSON.parse(text ?? "");
    }
    catch {
        return undefined;
    }
}
function mapping(text) {
    const found = json(text);
    const isMapping = typeof found === "object" && found !== null && !Array.isArray(found);
    return isMapping ? found : {};
}
function between(least, number, most) {
    return Math.min(Math.max(least, number), most);
}
