/**
 * What a client wants done at a table, until it is: one request after the other, each once.
 *
 * A request keeps its id and its number, however often it is sent: after a reconnect, and when the
 * server says that nothing was decided. It ends with an answer, or when its time is up. Until the
 * confirmed state shows what came of it, it is shown on top of that. Nothing here waits or sends;
 * room_requests.py is its twin.
 *
 * The easy mistake is to show an action on top of a state that has it. An update says whose request
 * has made it; of a snapshot nobody can tell what is in it. So what may have been sent before that is
 * not shown on top of it until it is answered, and neither is what is asked again.
 */
import { isMapping, spanMs, spoken, text, whole } from "./room_reading.js";
import { ActionError, ActionTimeoutError, Backoff, } from "./room_values.js";
// Whose numbers are remembered, for those who ask again.
const REMEMBERED = 256;
export class Requests {
    #terms;
    #options;
    #backoff;
    #numbers = new Map();
    #sent = new Set(); // of those whose numbers are remembered
    #brought = new Set(); // of those, too: others made them, and may have sent them
    #unanswered = new Set(); // the last ones of this connection
    #seq;
    #isIn = false;
    #isCurrent = true; // what is confirmed is of the history of this connection
    #mostBytes = null;
    #queue = [];
    #done = []; // and not seen yet
    #reached = 0;
    #reachedAt = -Infinity;
    #told = 0; // so far by this connection
    #doneBefore = [];
    constructor(terms, chance, options) {
        this.#terms = terms;
        this.#options = options;
        this.#seq = options.seq;
        this.#backoff = new Backoff(terms, chance);
    }
    get pending() {
        return this.#done.length + this.#queue.length;
    }
    /** Does somebody wait for an answer? */
    get isAwaited() {
        return this.#queue.length > 0;
    }
    /** Is nothing on its way, and everything to be seen that was answered? */
    isSettled(version) {
        return this.#queue.length === 0 && version !== null && version >= this.#reached;
    }
    // --- asking -----------------------------------------------------------------------------------
    /**
     * The request on its way that is the same as this one. Whoever names one that was asked before
     * means that one, whatever is on its way for the same.
     */
    twin(guard, requestId) {
        const isAgain = requestId !== null && this.#numbers.has(requestId);
        const isTwin = ({ id, guard: theirs }) => id === requestId || (guard !== null && theirs === guard && !isAgain);
        return this.#queue.find(isTwin)?.id ?? null;
    }
    /** `isNew`: the id was made for it, and nobody has had it before. */
    add(now, id, action, guard, isNew) {
        const isBrought = !isNew && !this.#numbers.has(id);
        if (this.#queue.length >= this.#terms.pending) {
            const said = `${this.#queue.length} actions wait for their answer, and no more may`;
            const mayBeSent = isBrought || this.#sent.has(id) || this.#brought.has(id);
            const answer = new ActionError("TOO_MANY", said, id, mayBeSent);
            this.#options.emit({ step: "settle", requestId: id, answer });
            return;
        }
        if (isBrought) {
            this.#brought.add(id);
        }
        else if (!this.#sent.has(id)) {
            this.#numbers.delete(id); // nobody has seen it, and later ones may have been taken
        }
        const wasSent = this.#sent.has(id) || this.#brought.has(id);
        const request = {
            id,
            action,
            guard,
            asked: now,
            until: now + this.#terms.timeoutMs,
            notBefore: -Infinity,
            isSent: false,
            wasSent,
            isShown: !wasSent,
            version: 0,
            seq: this.#number(id),
        };
        if (this.#isTooLarge(request))
            return;
        this.#queue.push(request);
        this.#options.changed();
        this.#pursue(now);
    }
    #number(id) {
        if (!this.#numbers.has(id)) {
            if (this.#seq !== null)
                this.#seq += 1;
            this.#numbers.set(id, this.#seq);
        }
        if (this.#numbers.size > REMEMBERED + this.#queue.length) {
            this.#forgetNumbers(new Set([id, ...this.#queue.map((request) => request.id)]));
        }
        return this.#numbers.get(id) ?? null;
    }
    /** The oldest, but none that is on its way. */
    #forgetNumbers(needed) {
        for (const oldest of [...this.#numbers.keys()].filter((each) => !needed.has(each))) {
            if (this.#numbers.size <= REMEMBERED)
                return;
            this.#numbers.delete(oldest);
            this.#sent.delete(oldest);
            this.#brought.delete(oldest);
        }
    }
    /** If it is, it is settled: the server would not even say to whom it says so. */
    #isTooLarge(request) {
        const most = this.#mostBytes;
        if (most === null)
            return false;
        const size = new TextEncoder().encode(spoken(this.#message(request))).length;
        if (size <= most)
            return false;
        const said = `the message has ${size} bytes, and the server takes ${most}`;
        const answer = new ActionError("TOO_LARGE", said, request.id, request.wasSent);
        this.#options.emit({ step: "settle", requestId: request.id, answer });
        return true;
    }
    #pursue(now) {
        const [first] = this.#queue;
        if (!this.#isIn || first === undefined || first.isSent || now < first.notBefore)
            return;
        first.isSent = true;
        first.wasSent = true;
        this.#sent.add(first.id);
        this.#unanswered.add(first.id);
        const [oldest] = this.#unanswered;
        if (this.#unanswered.size > REMEMBERED && oldest !== undefined)
            this.#unanswered.delete(oldest);
        this.#options.emit({ step: "send", message: this.#message(first) });
    }
    #message({ id, seq, action }) {
        const { tableId, clientId } = this.#options;
        const numbered = seq === null ? {} : { clientId, clientSeq: seq };
        return { type: "ACTION_REQUEST", requestId: id, ...numbered, payload: { ...action, tableId } };
    }
    // --- the connection ---------------------------------------------------------------------------
    /** `mostBytes` of a message, if the server has said so; `at` is the confirmed version. */
    joined(now, mostBytes, resumed, at) {
        const before = this.pending;
        this.#isIn = true;
        this.#isCurrent = resumed;
        if (resumed)
            this.#done = this.#done.filter(({ version }) => version > at);
        this.#told = 0;
        this.#doneBefore = this.#done;
        this.#mostBytes = mostBytes;
        this.#queue = this.#queue.filter((request) => !this.#isTooLarge(request));
        if (this.pending < before)
            this.#options.changed();
        this.#pursue(now);
    }
    /** What was sent may not have come, or its answer may not: it is sent again. */
    lost() {
        this.#isIn = false;
        this.#unanswered.clear();
        for (const request of this.#queue)
            request.isSent = false;
    }
    // --- answers ----------------------------------------------------------------------------------
    /** The answer to a request; `at` is the version that is confirmed. */
    result(now, requestId, payload, at) {
        const version = whole(payload["stateVersion"]) ?? 0;
        const { error, reply = null, action = null } = payload;
        const request = this.#answered(requestId);
        if (request === undefined) {
            // Too late to be told, but that far it is.
            if (this.#numbers.has(requestId ?? ""))
                this.#reach(now, version);
            return;
        }
        if (payload["success"] !== true) {
            this.#failed(now, request, isMapping(error) ? error : {}, version);
            return;
        }
        this.#reach(now, version);
        this.#remove(request);
        const cached = payload["cached"] === true;
        const answer = { requestId: request.id, reply, version, cached, action };
        this.#options.emit({ step: "settle", requestId: request.id, answer });
        const wasShown = request.isShown;
        request.isShown = wasShown || this.#isCurrent;
        if (version > at || !this.#isCurrent) {
            request.version = version;
            this.#done = [...this.#done, request];
        }
        if (!wasShown || !this.#done.includes(request))
            this.#options.changed();
        this.#next(now);
    }
    /** A request was answered with an error that is no result: was it ours? */
    refused(now, requestId, error) {
        const request = this.#answered(requestId);
        if (request !== undefined)
            this.#failed(now, request, error, 0);
        return request !== undefined;
    }
    #answered(requestId) {
        this.#unanswered.delete(requestId ?? "");
        return this.#queue.find(({ id }) => id === requestId);
    }
    /** The one request that the server may be talking of, if there is one and no other. */
    unanswered() {
        const [only, ...others] = this.#unanswered;
        return only === undefined || others.length > 0 ? null : only;
    }
    #failed(now, request, error, version) {
        const code = text(error["code"], "FAILED");
        if (error["retry"] === true) {
            const pause = this.#backoff.pauseMs();
            request.isSent = false;
            request.notBefore = now + (spanMs(error["retryAfterMs"]) ?? pause);
            return;
        }
        this.#reach(now, version);
        this.#remove(request);
        const answer = new ActionError(code, text(error["message"]), request.id);
        this.#options.emit({ step: "settle", requestId: request.id, answer });
        this.#options.changed();
        if (code === "STATE_STALE_VERSION")
            this.#options.stale(now);
        this.#next(now);
    }
    #remove(request) {
        this.#queue = this.#queue.filter((each) => each !== request);
    }
    #next(now) {
        this.#backoff.reset();
        this.#pursue(now);
    }
    #reach(now, version) {
        this.#told = Math.max(this.#told, version);
        if (version <= this.#reached)
            return;
        this.#reached = version;
        this.#reachedAt = now;
    }
    // --- what is shown ----------------------------------------------------------------------------
    /** The confirmed state is this far, by what was done for this request. */
    updated(version, requestId) {
        this.#isCurrent = true;
        this.#done = this.#done.filter((each) => each.version > version && each.id !== requestId);
        for (const request of this.#done)
            request.isShown = true;
        for (const request of this.#queue)
            request.isShown &&= request.id !== requestId;
    }
    /** The confirmed state is this far, and may have whatever was sent. */
    replaced(version) {
        this.updated(version, null);
        for (const request of this.#queue)
            request.isShown &&= !request.wasSent;
    }
    /** What was done may have been taken back: the confirmed state is all that counts. */
    forget() {
        this.#done = [];
        this.#reached = this.#told = 0;
    }
    /** The same for what was told by connections before; what this one has told is so. */
    forgetBefore() {
        this.#done = this.#done.filter((request) => !this.#doneBefore.includes(request));
        this.#reached = this.#told;
    }
    /**
     * There is nothing behind this version: what should be there was taken back. Not at once: whoever
     * says so may have looked before it was done.
     */
    forgetLate(now, version) {
        if (this.#reached <= version || now < this.#reachedAt + this.#terms.graceMs)
            return;
        this.forget();
        this.#options.changed();
    }
    /** The confirmed state with what is pending. */
    shown(confirmed) {
        const { optimistic } = this.#options;
        if (optimistic === null)
            return confirmed;
        let state = confirmed;
        for (const { action } of [...this.#done, ...this.#queue].filter(({ isShown }) => isShown)) {
            try {
                // A copy: whoever changes what they are given changes nothing here.
                state = optimistic(structuredClone(state), structuredClone(action));
            }
            catch {
                // It does not fit this state: it shows nothing.
            }
        }
        return state;
    }
    // --- time -------------------------------------------------------------------------------------
    tick(now) {
        // All have the same time, so the first is late before the others.
        const due = this.#queue.findIndex(({ until }) => now < until);
        const late = this.#queue.splice(0, due < 0 ? this.#queue.length : due);
        for (const { id, wasSent, asked } of late) {
            const why = this.#options.whyUnsent(asked);
            const answer = new ActionTimeoutError(id, this.#terms.timeoutMs, wasSent, why);
            this.#options.emit({ step: "settle", requestId: id, answer });
        }
        if (late.length > 0)
            this.#options.changed();
        this.#pursue(now);
    }
    due() {
        const [first] = this.#queue;
        if (first === undefined)
            return Infinity;
        return this.#isIn && !first.isSent ? Math.min(first.until, first.notBefore) : first.until;
    }
    end(error) {
        const queue = this.#queue;
        this.#queue = [];
        for (const { id } of queue) {
            this.#options.emit({ step: "settle", requestId: id, answer: error });
        }
        if (queue.length > 0)
            this.#options.changed();
    }
}
