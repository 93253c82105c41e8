/**
 * Sit at a table over WebSocket: see what happens, and act, each once, through every cut.
 *
 *     const table = room("wss://poker.example/rooms", { tableId: "t1", token }).listen({
 *       onState: ({ state }) => draw(state),
 *       onEvent: ({ data }) => tell(data),
 *     });
 *     const result = await table.act({ actionType: "raise", amount: 100 });
 *
 * It connects again by itself, from where it was, for as long as that may help; a `RoomError` says
 * when it does not. An action is sent as often as it takes, and done once: an `ActionError` says that
 * it was refused, a `TimeoutError` that nobody knows. What happens is decided by room_rules.
 *
 * The easy mistake is to act again after a timeout without the `requestId` that it tells.
 */
import { Line, addressOf } from "./room_line.js";
import { spoken } from "./room_reading.js";
import { Guest } from "./room_rules.js";
import { ROOM_TERMS, RoomError, } from "./room_values.js";
/** A table of the rooms at this address. It connects at once. */
export function room(url, options) {
    return new Table(url, options);
}
// The longest that a timer knows; a larger number would be none at all.
const LONGEST_TIMER_MS = 2 ** 31 - 1;
// When to go on after something has thrown that should not have.
const AGAIN_MS = 1_000;
const WORLD = {
    now: () => performance.now(),
    wall: Date.now,
    chance: Math.random,
    later: (ms, call) => {
        const timer = setTimeout(call, Math.min(ms, LONGEST_TIMER_MS));
        return () => clearTimeout(timer);
    },
};
/** A place at a table; `room` makes one. `close` leaves it, and leaves nothing behind. */
export class Table {
    #guest;
    #address;
    #world;
    #listeners = [];
    #waiting = new Map();
    #hears;
    #line = null;
    #callOff = () => undefined;
    #isAdvancing = false;
    #isTold = false;
    #told = null; // to those who listen
    constructor(url, options) {
        this.#world = options.world ?? WORLD;
        this.#address = addressOf(url, options);
        this.#guest = guestOf(options, this.#world);
        this.#hears = this.#hearing();
        this.#advance();
    }
    // --- how things stand -------------------------------------------------------------------------
    /** The confirmed state, with our actions made already that are not in it; null before there is one. */
    get state() {
        return this.#guest.state;
    }
    /** The state as the server has it. */
    get confirmed() {
        return this.#guest.confirmed;
    }
    get version() {
        return this.#guest.version;
    }
    get cursor() {
        return this.#guest.cursor;
    }
    get viewer() {
        return this.#guest.viewer;
    }
    get status() {
        return this.#guest.status;
    }
    /** Why the server did not let us in, if it has said so and has not done so since. */
    get turnedAway() {
        return this.#guest.turnedAway;
    }
    /** How many of our actions are not answered, or not to be seen in the confirmed state yet. */
    get pending() {
        return this.#guest.pending;
    }
    /** Is nothing of ours on its way, and all to be seen that was answered? */
    get isSettled() {
        return this.#guest.isSettled;
    }
    // --- listening --------------------------------------------------------------------------------
    /** Call these for how things stand, and for what comes from now on. */
    listen(listener) {
        const { status, turnedAway, over } = this.#guest;
        const state = this.#guest.version === null ? null : this.#told;
        this.#listeners.push(listener);
        call(() => listener.onStatus?.(status, turnedAway));
        if (state !== null)
            call(() => listener.onState?.(state));
        const error = over?.error ?? null;
        if (error !== null)
            call(() => listener.onError?.(error));
        return this;
    }
    #tell(news) {
        if (news.type === "state")
            this.#told = news.state;
        // Who listens from now on begins with this one.
        for (const listener of [...this.#listeners])
            call(() => told(listener, news));
    }
    // --- acting -----------------------------------------------------------------------------------
    /** Ask for this. While an action with the same guard is on its way, this is that one. */
    act(action, options = {}) {
        const { over } = this.#guest;
        if (over !== null)
            return refused(over.error ?? new RoomError("this table is closed", "CLOSED"));
        if (typeof action?.actionType !== "string") {
            return refused(new TypeError("an action has an actionType, which is text"));
        }
        try {
            const id = this.#guest.act(this.#world.now(), action, options);
            const waiting = this.#waiting.get(id) ?? newWaiting();
            this.#waiting.set(id, waiting);
            this.#advance();
            return waiting.promise;
        }
        catch (error) {
            return refused(error); // it cannot be said in JSON
        }
    }
    /** Ask for the whole state anew. */
    requestSnapshot() {
        this.#guest.requestSnapshot(this.#world.now());
        this.#advance();
    }
    /** Leave. Nobody hears what became of actions that are on their way. */
    close() {
        this.#guest.stop();
        this.#advance();
    }
    // --- doing what is to be done -----------------------------------------------------------------
    /** Do all that can be done now, and come back when there may be more. */
    #advance() {
        if (this.#isAdvancing)
            return; // by a listener: whoever called it goes on
        this.#isAdvancing = true;
        this.#callOff();
        // Whatever goes wrong, it comes back.
        let withinMs = AGAIN_MS;
        try {
            for (;;) {
                const step = this.#guest.next(this.#world.now());
                if (step.step === "wait") {
                    withinMs = step.withinMs;
                    break;
                }
                if (step.step === "over")
                    withinMs = null;
                this.#do(step);
                if (step.step === "over")
                    break;
            }
        }
        finally {
            this.#isAdvancing = false;
            if (withinMs !== null)
                this.#callOff = this.#world.later(withinMs, () => this.#advance());
        }
    }
    #do(step) {
        switch (step.step) {
            case "open":
                this.#line = new Line(this.#address, this.#hears);
                break;
            case "hang up":
                this.#hangUp();
                break;
            case "send":
                this.#line?.say(spoken(step.message));
                break;
            case "deliver":
                this.#tell(step.news);
                break;
            case "settle":
                this.#waiting.get(step.requestId)?.settle(step.answer);
                this.#waiting.delete(step.requestId);
                break;
            case "over":
                this.#hangUp();
                this.#finish(step.error);
                break;
        }
    }
    #hangUp() {
        const line = this.#line;
        this.#line = null;
        line?.hangUp();
    }
    #finish(error) {
        if (error === null || this.#isTold)
            return;
        this.#isTold = true;
        for (const listener of this.#listeners)
            call(() => listener.onError?.(error));
    }
    #hearing() {
        const about = (line, hear) => {
            if (line !== this.#line)
                return;
            try {
                hear(this.#world.now());
            }
            finally {
                this.#advance();
            }
        };
        return {
            opened: (line, token) => about(line, (now) => this.#guest.opened(now, token)),
            received: (line, said) => about(line, (now) => this.#guest.received(now, said)),
            closed: (line, code, why) => about(line, (now) => this.#guest.closed(now, code, why)),
            failed: (line, error) => about(line, () => this.#guest.fail(error)),
        };
    }
}
function told(listener, news) {
    switch (news.type) {
        case "state":
            listener.onState?.(news.state);
            break;
        case "event":
            listener.onEvent?.(news.event);
            break;
        case "result":
            listener.onResult?.(news.result);
            break;
        case "presence":
            listener.onPresence?.(news.presence);
            break;
        case "became":
            listener.onStatus?.(news.status, news.turnedAway);
            break;
        case "trouble":
            listener.onTrouble?.({ code: news.code, message: news.message });
            break;
    }
}
/** A listener that throws is heard of, and disturbs nobody else. */
function call(listener) {
    try {
        listener();
    }
    catch (error) {
        queueMicrotask(() => {
            throw error;
        });
    }
}
function refused(error) {
    const { promise, settle } = newWaiting();
    settle(error);
    return promise;
}
function newWaiting() {
    let settle = () => undefined;
    const promise = new Promise((resolve, reject) => {
        settle = (answer) => (answer instanceof Error ? reject(answer) : resolve(answer));
    });
    promise.catch(() => undefined); // whoever does not wait is not told; Node would end for it
    return { promise, settle };
}
// --- settings -----------------------------------------------------------------------------------
function guestOf(options, world) {
    const { tableId, token, clientId, clientSeq, timeoutMs, spectate = false } = options;
    if (!tableId)
        throw new TypeError("tableId is empty: which table?");
    if (clientSeq !== undefined && clientId === undefined) {
        throw new TypeError("clientSeq goes on with the numbers of a clientId: give both");
    }
    if (timeoutMs !== undefined && !(timeoutMs > 0)) {
        throw new TypeError(`timeoutMs: ${timeoutMs} must be milliseconds, more than 0`);
    }
    const { chance, wall } = world;
    return new Guest({
        tableId,
        terms: { ...ROOM_TERMS, ...options.terms, ...(timeoutMs === undefined ? {} : { timeoutMs }) },
        chance,
        letters: () => letters(6),
        wall,
        clientId: clientId ?? letters(12),
        // Numbers under a name that somebody else may have, or had: they would be taken for old.
        seq: clientId === undefined ? 0 : (clientSeq ?? null),
        spectate,
        renews: typeof token === "function",
        optimistic: options.optimistic ?? null,
    });
}
const LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789";
function letters(count) {
    const bytes = new Uint8Array(count);
    // Node 18 has none at hand. They are to be different, and no secret.
    if (typeof crypto === "undefined")
        bytes.forEach((_, at) => (bytes[at] = Math.random() * 256));
    else
        crypto.getRandomValues(bytes);
    return Array.from(bytes, (byte) => LETTERS[byte % LETTERS.length]).join("");
}
