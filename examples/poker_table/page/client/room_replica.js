/**
 * What a client knows of a table: a state at a position, and what to do where that does not go on.
 *
 * An update is made to the state if it begins where the state is: at the same version of the same
 * history, which is what a position says and a number does not. What was seen is dropped. Anything
 * else is kept, and a snapshot asked for: one at a time, however much is missing, and again if none
 * comes, more and more slowly. Nothing here waits or sends; room_replica.py is its twin.
 *
 * The easy mistake is to compare what is no number: nothing is read of an update that is not whole.
 */
import { patched } from "./patches.js";
import { positioned, text, updateOf } from "./room_reading.js";
import { Backoff } from "./room_values.js";
import {} from "./rules.js";
// Why a server sends the state of a history that is not the one we have.
const ANOTHER = new Set(["forked", "ahead", "gone"]);
export class Replica {
    position = null;
    state = null;
    viewer = null;
    #tableId;
    #terms;
    #chance;
    #calls;
    #backoff;
    #isIn = false;
    #buffer = [];
    #isBehind = false; // the last answer was older than what we have
    #wanted = null;
    #ask = null;
    #asks = 0;
    #askedAt = -Infinity;
    #notBefore = -Infinity;
    #head = null;
    #apartSince = null;
    constructor(tableId, terms, chance, calls) {
        this.#tableId = tableId;
        this.#terms = terms;
        this.#chance = chance;
        this.#calls = calls;
        this.#backoff = new Backoff(terms, chance);
    }
    get version() {
        return this.position === null ? null : this.position.offset;
    }
    // --- the connection ---------------------------------------------------------------------------
    joined(now, resumed, head) {
        this.#isIn = true;
        if (!resumed) {
            this.#ask = { id: null, at: this.position, until: now + this.#terms.resyncMs };
        }
        else if (this.position === null) {
            this.want(now, "reconnect");
        }
        else {
            this.heard(now, head);
            this.#pursue(now);
        }
    }
    /** The connection is over: what follows comes from another. */
    lost() {
        this.#isIn = false;
        this.#ask = null;
        this.#buffer = [];
        this.#settled();
    }
    /** What we have is the view of somebody else. */
    forget() {
        this.position = this.state = this.viewer = null;
    }
    // --- updates ----------------------------------------------------------------------------------
    update(now, payload, requestId) {
        const found = updateOf(payload, requestId);
        const at = this.position;
        if (found === null) {
            this.want(now, "gap");
        }
        else if (at === null) {
            this.#keep(found);
        }
        else if (found.position.offset <= at.offset) {
            if (found.position.offset === at.offset && found.position.tag !== at.tag) {
                this.want(now, "gap");
            }
        }
        else if (isSame(found.previous, at)) {
            this.#follow(now, found);
        }
        else {
            this.#keep(found);
            this.want(now, "gap");
        }
    }
    #keep(update) {
        // The newest: older ones are in the snapshot that will come.
        const kept = [...this.#buffer, update];
        this.#buffer = kept.slice(Math.max(0, kept.length - this.#terms.buffered));
    }
    #follow(now, update) {
        if (!this.#apply(now, update)) {
            this.#keep(update);
            this.want(now, "gap");
            return;
        }
        this.#drain(now);
        if (this.#buffer.length > 0) {
            // Not without a pause, if one was asked for already: what is kept may fit nowhere.
            this.want(now, "gap");
            return;
        }
        this.#asks = 0;
        if (this.#wanted === "gap")
            this.#wanted = null;
    }
    #apply(now, update) {
        let state;
        try {
            state = patched(this.state, update.patch);
        }
        catch {
            return false; // whatever is wrong with it
        }
        this.#move(now, update.position, state);
        this.#calls.moved(update);
        return true;
    }
    /** Make what can be made of what was kept, and keep the rest. */
    #drain(now) {
        const kept = this.#buffer.sort((one, other) => one.position.offset - other.position.offset);
        this.#buffer = [];
        for (const update of kept) {
            const isNext = isSame(update.previous, this.position);
            if (isNext && this.#apply(now, update))
                continue;
            if (update.position.offset > (this.version ?? 0))
                this.#buffer.push(update);
        }
    }
    #move(now, position, state) {
        this.position = position;
        this.state = state;
        this.#isBehind = false;
        // It gets nearer, or it is there.
        if (this.#head !== null && isAhead(this.#head, position))
            this.#apartSince = now;
        else
            this.#settled();
    }
    // --- snapshots --------------------------------------------------------------------------------
    snapshot(now, payload, requestId) {
        const asked = this.#ask;
        const ask = asked !== null && requestId === asked.id ? asked : null;
        const position = positioned(payload, "stateVersion", "position");
        if (position === null || !("state" in payload)) {
            if (ask !== null)
                this.#ask = null;
            this.#notHelped(now);
        }
        else if (this.#isWelcome(payload, position, ask)) {
            this.#take(now, payload, position, ask);
        }
        else if (ask !== null) {
            this.#ask = null;
            if (this.#wanted !== null)
                this.#notHelped(now);
        }
        else if (requestId === null) {
            this.#notHelped(now);
        }
    }
    /** May the state be this, though it may have been newer before? */
    #isWelcome(payload, position, ask) {
        if (this.position === null || position.offset >= this.position.offset)
            return true;
        if (ANOTHER.has(payload["reason"]))
            return true;
        if (ask === null || ask.id === null)
            return ask !== null;
        return isSame(ask.at, this.position) && this.#isSaidTwice();
    }
    /**
     * Whoever answers may have read it before what we were shown, but not twice: then what we were shown
     * was taken back. Taken at once, events would be told again.
     */
    #isSaidTwice() {
        const wasBehind = this.#isBehind;
        this.#isBehind = true;
        return wasBehind;
    }
    #take(now, payload, position, ask) {
        const isFirst = ask !== null && ask.id === null;
        if (isFirst || ANOTHER.has(payload["reason"]) || isFork(position, this.position)) {
            this.#calls.forked(isFirst);
        }
        if (ask !== null)
            this.#ask = null;
        // If there is another hole at once, it may be one that stays.
        if (ask !== null && !isFirst && this.#wanted === "gap")
            this.#pause(now);
        if (this.#ask === null)
            this.#wanted = null;
        this.viewer = text(payload["viewer"]) || null;
        this.#move(now, position, payload["state"]);
        this.#calls.moved(null);
        this.#drain(now);
        if (this.#buffer.length > 0)
            this.#notHelped(now);
    }
    /** Ask again, but not at once. */
    #notHelped(now) {
        this.#pause(now);
        this.want(now, this.#wanted ?? "gap");
    }
    /** Not longer than it lasts already: what nobody asked for puts off no question for ever. */
    #pause(now) {
        if (now >= this.#notBefore)
            this.#notBefore = now + this.#backoff.pauseMs();
    }
    // --- asking -----------------------------------------------------------------------------------
    get isAsking() {
        return this.#ask !== null && this.#ask.id !== null;
    }
    want(now, reason) {
        this.#wanted ??= reason;
        this.#pursue(now);
    }
    /** A request was answered with an error: was it ours? */
    refused(now, requestId, afterMs) {
        if (requestId === null || this.#ask === null || this.#ask.id !== requestId)
            return false;
        this.#ask = null;
        const pause = this.#backoff.pauseMs();
        this.#notBefore = now + (afterMs ?? pause);
        return true;
    }
    #pursue(now) {
        if (!this.#isIn || this.#wanted === null || this.#ask !== null)
            return;
        if (now < this.#notBefore)
            return;
        if (now - this.#askedAt > this.#terms.longestMs) {
            this.#asks = 0;
            this.#backoff.reset();
        }
        const least = this.#terms.resyncMs;
        const ceiling = Math.min(least * 2 ** Math.min(this.#asks, 30), this.#terms.longestMs);
        const withinMs = least + this.#chance() * Math.max(0, ceiling - least);
        this.#asks += 1;
        this.#askedAt = now;
        const requestId = this.#calls.newId();
        this.#ask = { id: requestId, at: this.position, until: now + withinMs };
        const payload = {
            tableId: this.#tableId,
            currentVersion: this.version ?? 0,
            reason: this.#wanted,
        };
        this.#calls.emit({ step: "send", message: { type: "REQUEST_SNAPSHOT", requestId, payload } });
    }
    // --- what the server says is there ------------------------------------------------------------
    heard(now, head) {
        const at = this.position;
        if (head === null || at === null)
            return;
        if (isSame(head, at)) {
            this.#settled();
            return;
        }
        const since = this.#apartSince;
        this.#head = head;
        if (since === null) {
            this.#apartSince = now;
        }
        else if (!isAhead(head, at) && now >= since + this.#terms.graceMs) {
            // Behind us, and that not only once: its numbers begin anew, or were taken back.
            this.#settled();
            this.want(now, "gap");
        }
    }
    #settled() {
        this.#head = null;
        this.#apartSince = null;
    }
    // --- time -------------------------------------------------------------------------------------
    tick(now) {
        if (this.#ask !== null && now >= this.#ask.until) {
            if (this.#ask.id === null)
                this.#wanted ??= "reconnect";
            this.#ask = null;
        }
        if (now >= this.#lateAt()) {
            this.#settled();
            this.want(now, "gap");
        }
        this.#pursue(now);
    }
    due() {
        const due = this.#lateAt();
        if (this.#ask !== null)
            return Math.min(due, this.#ask.until);
        return this.#isIn && this.#wanted !== null ? Math.min(due, this.#notBefore) : due;
    }
    /** When what the server said is there should have come. */
    #lateAt() {
        if (this.#head === null || this.position === null || this.#apartSince === null)
            return Infinity;
        return isAhead(this.#head, this.position) ? this.#apartSince + this.#terms.graceMs : Infinity;
    }
}
function isSame(one, other) {
    return one?.offset === other?.offset && one?.tag === other?.tag;
}
/** Is there more than we have, or another than ours in its place? */
function isAhead(head, at) {
    return head.offset > at.offset || (head.offset === at.offset && head.tag !== at.tag);
}
function isFork(position, at) {
    return at !== null && isAhead(at, position);
}
