/**
 * When a room's client connects, as whom it joins, and when it tries again. Pure.
 *
 * It has one connection at a time: it waits, opens one, joins, and is in, until that ends, falls
 * silent or is shown out; then it waits again, longer with every failure. It ends when we leave, or
 * when the server has turned us away for good. Nothing here waits or sends; room_connection.py is its
 * twin.
 *
 * The easy mistake is a pause that outlasts those who wait for an answer: while somebody does, pauses
 * stay short. Those who only look on may take their time, and do not come all together.
 */
import { Backoff, RoomError, } from "./room_values.js";
// So many heartbeats long, somebody who is there says something.
const PATIENCE = 2.5;
// So many connections, at least, are tried in the time that an action has.
const TRIES = 5;
// What may be wrong if there is no connection; whoever is refused one is seldom told why.
const ADVICE = "look at the address, its path, and whether the server lets this page in (origins)";
const SHOWN_OUT = { code: "UNAUTHORIZED", message: "may not be there any more" };
const GOING_AWAY = 1001;
const TRY_LATER = 1013;
export class Connection {
    status = "connecting";
    turnedAway = null;
    over = null;
    joinId = "";
    #terms;
    #chance;
    #options;
    #backoff;
    #phase = "waiting";
    #until = -Infinity;
    #isToldWhen = false; // to come back: nobody comes sooner
    #silenceMs;
    #rushed = false;
    #token = null;
    #tokenRefused = null;
    #refusal = null; // the last one since we were in
    #reason = ""; // with which the last connection has ended, or the last try
    #last = -Infinity; // when there was a connection, before this one
    constructor(terms, chance, options) {
        this.#terms = terms;
        this.#chance = chance;
        this.#options = options;
        this.#backoff = new Backoff(terms, chance);
        this.#silenceMs = PATIENCE * terms.heartbeatMs;
    }
    get isJoining() {
        return this.#phase === "joining";
    }
    /** Is there a connection, of which what comes counts? */
    get isHeard() {
        return this.over === null && ["joining", "open"].includes(this.#phase);
    }
    /** Why we were not let in since then; empty, if we were, or nobody knows. */
    whyNotIn(since) {
        const wasThere = this.isHeard || this.#last > since;
        if (!wasThere && this.turnedAway === null) {
            const reason = this.#reason === "" ? "" : ` (${this.#reason})`;
            return `there was no connection${reason}: ${ADVICE}`;
        }
        return this.#refusal === null ? "" : `the server does not let us in: ${wordsOf(this.#refusal)}`;
    }
    // --- its course -------------------------------------------------------------------------------
    opened(now, token) {
        if (this.over !== null || this.#phase !== "opening")
            return;
        if (this.#tokenRefused !== null && token === this.#token) {
            this.#turnedAwayForGood(this.#tokenRefused);
            return;
        }
        this.#phase = "joining";
        this.#reason = "";
        this.#until = now + this.#terms.connectMs;
        this.#token = token;
        this.joinId = this.#options.newId();
        const { tableId, spectate, cursor, emit } = this.#options;
        const told = { tableId, cursor: cursor(), token, spectate: spectate || null };
        const payload = Object.fromEntries(Object.entries(told).filter(([, found]) => found !== null));
        emit({ step: "send", message: { type: "JOIN", requestId: this.joinId, payload } });
    }
    /** We are in; `heartbeatMs`, if the server has said so. */
    joined(now, heartbeatMs) {
        this.#silenceMs = PATIENCE * (heartbeatMs ?? this.#terms.heartbeatMs);
        this.#phase = "open";
        this.#until = now + this.#silenceMs;
        this.#tokenRefused = this.#refusal = null;
        this.#become("open");
    }
    /** Somebody is there. */
    heard(now) {
        if (this.#phase === "open")
            this.#until = now + this.#silenceMs;
    }
    /** The connection is good for something: what went wrong before is forgotten. */
    steady() {
        this.#backoff.reset();
        this.#rushed = false;
    }
    /** The connection is over, or there is none: cut, ended, refused. */
    closed(now, code, reason) {
        if (this.over !== null || this.#phase === "waiting")
            return;
        this.#reason = reason;
        if (code === GOING_AWAY && !this.#rushed) {
            this.#rushed = true;
            this.#again(now, "drained", this.#chance() * this.#terms.backoffMs);
        }
        else if (code === TRY_LATER) {
            const pause = 2 * this.#terms.backoffMs + this.#pauseMs();
            this.#again(now, "overloaded", pause, { isToldWhen: true });
        }
        else {
            this.#again(now, "ended", this.#pauseMs());
        }
    }
    /** Shown out. Whether we may come back is said when we do. */
    left(now, reason) {
        const turnedAway = reason === "refused" ? SHOWN_OUT : null;
        this.#again(now, "left", this.#pauseMs(), { turnedAway });
    }
    end(status, error, why = null) {
        if (this.over !== null)
            return;
        this.#options.ended(error);
        this.#become(status, why);
        this.over = { step: "over", error };
    }
    // --- turned away ------------------------------------------------------------------------------
    /** The answer to our join. */
    refused(now, why, retry, afterMs) {
        if (why.code === "UNAUTHORIZED") {
            this.unauthorized(now, why);
        }
        else if (!retry) {
            this.#turnedAwayForGood(why);
        }
        else if (afterMs === null) {
            this.#again(now, "ended", this.#pauseMs(), { turnedAway: why });
        }
        else {
            // Nobody comes sooner than told, and not all together.
            const pause = afterMs + this.#chance() * this.#terms.backoffMs;
            this.#again(now, "told", pause, { isToldWhen: true, turnedAway: why });
        }
    }
    unauthorized(now, why) {
        if (!this.#options.renews) {
            this.#turnedAwayForGood(why);
            return;
        }
        this.#tokenRefused = why;
        const rushed = this.#rushed;
        this.#rushed = true;
        this.#again(now, "unauthorized", rushed ? this.#pauseMs() : 0, { turnedAway: why });
    }
    #turnedAwayForGood(why) {
        this.end("failed", new RoomError(wordsOf(why), why.code), why);
    }
    // --- trying again -----------------------------------------------------------------------------
    #again(now, why, afterMs, { isToldWhen = false, turnedAway = null } = {}) {
        if (this.isHeard)
            this.#last = now;
        this.#refusal = turnedAway ?? this.#refusal;
        this.#phase = "waiting";
        this.#until = now + afterMs;
        this.#isToldWhen = isToldWhen;
        this.#options.lost();
        this.#options.emit({ step: "hang up", afterMs, why });
        this.#become("waiting", turnedAway);
    }
    #pauseMs() {
        return this.#backoff.pauseMs(this.#mostMs());
    }
    /** Whoever waits for an answer has only so long; the others need not come together. */
    #mostMs() {
        return this.#options.isAwaited() ? this.#terms.timeoutMs / TRIES : Infinity;
    }
    /** The pause may have been made when nobody waited for an answer; now somebody may. */
    hurry(now) {
        if (this.#phase !== "waiting" || !this.#options.isAwaited() || this.#isToldWhen)
            return;
        this.#until = Math.min(this.#until, now + this.#backoff.sameMs(this.#mostMs()));
    }
    // --- time -------------------------------------------------------------------------------------
    tick(now) {
        if (now < this.#until)
            return;
        if (this.#phase !== "waiting") {
            this.#again(now, "silence", this.#pauseMs());
            return;
        }
        this.#phase = "opening";
        this.#until = now + this.#terms.connectMs;
        this.#become("connecting", this.turnedAway);
        this.#options.emit({ step: "open", withinMs: this.#terms.connectMs });
    }
    due() {
        return this.#until;
    }
    #become(status, turnedAway = null) {
        this.turnedAway = turnedAway;
        if (this.status === status)
            return;
        this.status = status;
        this.#options.emit({ step: "deliver", news: { type: "became", status, turnedAway } });
    }
}
function wordsOf({ code, message }) {
    return message === "" ? code : `${code}: ${message}`;
}
