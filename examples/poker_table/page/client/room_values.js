/** What a room's client hands over, what it does, and what goes wrong, as values. */
// --- what goes wrong ----------------------------------------------------------------------------
/** The table cannot be had, or not any more. `code` is the server's word for it, or ours. */
export class RoomError extends Error {
    code;
    name = "RoomError";
    constructor(message, code = "") {
        super(message);
        this.code = code;
    }
}
/**
 * An action was refused: nothing was changed by it. `code` says why. By the server; or, if `wasSent`
 * is false, before it was sent: the server would not take it.
 */
export class ActionError extends Error {
    code;
    detail;
    requestId;
    wasSent;
    name = "ActionError";
    constructor(code, 
    /** What the server said besides. */
    detail, requestId, wasSent = true) {
        super(detail === "" ? code : `${code}: ${detail}`);
        this.code = code;
        this.detail = detail;
        this.requestId = requestId;
        this.wasSent = wasSent;
    }
}
/**
 * No answer came in time. Unless `wasSent` is false, nobody knows what became of the action; it is
 * false only of what was never sent under this id, as far as this client can know; then the message
 * says why, if anybody knows. To ask again, and not to do it twice:
 * `act(action, { requestId: error.requestId })`.
 */
export class ActionTimeoutError extends Error {
    requestId;
    wasSent;
    name = "TimeoutError";
    constructor(requestId, timeoutMs, wasSent, why = "") {
        const unknown = `the outcome is unknown; ask again with { requestId: "${requestId}" }`;
        const unsent = `it was never sent: nothing was changed by it${why === "" ? "" : `; ${why}`}`;
        super(`no answer in ${timeoutMs} ms: ${wasSent ? unknown : unsent}`);
        this.requestId = requestId;
        this.wasSent = wasSent;
    }
}
export const ROOM_TERMS = {
    timeoutMs: 10_000,
    resyncMs: 5_000,
    graceMs: 2_000,
    connectMs: 10_000,
    heartbeatMs: 15_000,
    backoffMs: 1_000,
    longestMs: 30_000,
    buffered: 256,
    pending: 100,
};
/**
 * Pauses that grow: from half the first one, at random, up to twice the last one's most. `most` is as
 * long as one may get; the first one may always be what it is.
 */
export class Backoff {
    #terms;
    #chance;
    #failures = 0;
    constructor(terms, chance) {
        this.#terms = terms;
        this.#chance = chance;
    }
    pauseMs(most = Infinity) {
        this.#failures += 1;
        return this.sameMs(most);
    }
    /** After the same failure: another chance. */
    sameMs(most = Infinity) {
        const base = this.#terms.backoffMs;
        const doubled = base * 2 ** Math.min(Math.max(0, this.#failures - 1), 30);
        const ceiling = Math.min(doubled, this.#terms.longestMs, Math.max(base, most));
        return base / 2 + this.#chance() * (ceiling - base / 2);
    }
    reset() {
        this.#failures = 0;
    }
}
