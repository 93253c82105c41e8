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

import { type Address, type Hears, Line, type SocketClass, type Token, addressOf } from "./room_line.js";
import { spoken } from "./room_reading.js";
import { type Acting, Guest } from "./room_rules.js";
import {
  type ActionResult,
  type News,
  type Payload,
  type Presence,
  ROOM_TERMS,
  RoomError,
  type RoomEvent,
  type RoomResult,
  type RoomState,
  type RoomStatus,
  type RoomStep,
  type RoomTerms,
  type TurnedAway,
} from "./room_values.js";

/** What to do: a type, and whatever else the room wants to know. */
export interface Action {
  readonly actionType: string;
  readonly [name: string]: unknown;
}

export interface RoomOptions<S = any> {
  readonly tableId: string;
  /** Who we are. A function is asked at every connection; one that throws is the end. */
  readonly token?: Token;
  /** Only look. */
  readonly spectate?: boolean;
  /** What the ids of requests begin with; by default something random. */
  readonly clientId?: string;
  /** The number of the last request under this `clientId`: requests are numbered from there on. */
  readonly clientSeq?: number;
  /** What will come of an action. What it is given is its own to change. */
  readonly optimistic?: (state: S, action: Action) => S;
  /** How long an action may take. */
  readonly timeoutMs?: number;
  /** How patient it is. */
  readonly terms?: Partial<RoomTerms>;
  /** The class to connect with; by default that of the browser. In Node before 22: that of `ws`. */
  readonly WebSocket?: SocketClass;
  /** Time and chance, for tests. */
  readonly world?: RoomWorld;
}

export interface RoomWorld {
  readonly now: () => number;
  /** Since 1970. */
  readonly wall: () => number;
  /** From 0 to 1. */
  readonly chance: () => number;
  /** Call this then; what is returned calls it off. */
  readonly later: (ms: number, call: () => void) => () => void;
}

export interface RoomListener<S = any> {
  readonly onState?: (state: RoomState<S>) => void;
  readonly onEvent?: (event: RoomEvent) => void;
  /** What came of a hand. */
  readonly onResult?: (result: RoomResult) => void;
  readonly onPresence?: (presence: Presence) => void;
  /** `turnedAway` says why, if the server did not let us in last time. */
  readonly onStatus?: (status: RoomStatus, turnedAway: TurnedAway | null) => void;
  /** An error of the server's that belongs to nothing that was asked for. */
  readonly onTrouble?: (trouble: { readonly code: string; readonly message: string }) => void;
  /** There is no use in trying any more. */
  readonly onError?: (error: RoomError) => void;
}

/** A table of the rooms at this address. It connects at once. */
export function room<S = any>(url: string | URL, options: RoomOptions<S>): Table<S> {
  return new Table<S>(url, options);
}

// The longest that a timer knows; a larger number would be none at all.
const LONGEST_TIMER_MS = 2 ** 31 - 1;

// When to go on after something has thrown that should not have.
const AGAIN_MS = 1_000;

const WORLD: RoomWorld = {
  now: () => performance.now(),
  wall: Date.now,
  chance: Math.random,
  later: (ms, call) => {
    const timer = setTimeout(call, Math.min(ms, LONGEST_TIMER_MS));
    return () => clearTimeout(timer);
  },
};

interface Waiting {
  readonly promise: Promise<ActionResult>;
  readonly settle: (answer: ActionResult | Error) => void;
}

/** A place at a table; `room` makes one. `close` leaves it, and leaves nothing behind. */
export class Table<S = any> {
  readonly #guest: Guest;
  readonly #address: Address;
  readonly #world: RoomWorld;
  readonly #listeners: RoomListener<S>[] = [];
  readonly #waiting = new Map<string, Waiting>();
  readonly #hears: Hears;
  #line: Line | null = null;
  #callOff: () => void = () => undefined;
  #isAdvancing = false;
  #isTold = false;
  #told: RoomState<S> | null = null; // to those who listen

  constructor(url: string | URL, options: RoomOptions<S>) {
    this.#world = options.world ?? WORLD;
    this.#address = addressOf(url, options);
    this.#guest = guestOf(options, this.#world);
    this.#hears = this.#hearing();
    this.#advance();
  }

  // --- how things stand -------------------------------------------------------------------------

  /** The confirmed state, with our actions made already that are not in it; null before there is one. */
  get state(): S | null {
    return this.#guest.state as S | null;
  }

  /** The state as the server has it. */
  get confirmed(): S | null {
    return this.#guest.confirmed as S | null;
  }

  get version(): number | null {
    return this.#guest.version;
  }

  get cursor(): string | null {
    return this.#guest.cursor;
  }

  get viewer(): string | null {
    return this.#guest.viewer;
  }

  get status(): RoomStatus {
    return this.#guest.status;
  }

  /** Why the server did not let us in, if it has said so and has not done so since. */
  get turnedAway(): TurnedAway | null {
    return this.#guest.turnedAway;
  }

  /** How many of our actions are not answered, or not to be seen in the confirmed state yet. */
  get pending(): number {
    return this.#guest.pending;
  }

  /** Is nothing of ours on its way, and all to be seen that was answered? */
  get isSettled(): boolean {
    return this.#guest.isSettled;
  }

  // --- listening --------------------------------------------------------------------------------

  /** Call these for how things stand, and for what comes from now on. */
  listen(listener: RoomListener<S>): this {
    const { status, turnedAway, over } = this.#guest;
    const state = this.#guest.version === null ? null : this.#told;
    this.#listeners.push(listener);
    call(() => listener.onStatus?.(status, turnedAway));
    if (state !== null) call(() => listener.onState?.(state));
    const error = over?.error ?? null;
    if (error !== null) call(() => listener.onError?.(error));
    return this;
  }

  #tell(news: News): void {
    if (news.type === "state") this.#told = news.state as RoomState<S>;
    // Who listens from now on begins with this one.
    for (const listener of [...this.#listeners]) call(() => told(listener, news));
  }

  // --- acting -----------------------------------------------------------------------------------

  /** Ask for this. While an action with the same guard is on its way, this is that one. */
  act(action: Action, options: Acting = {}): Promise<ActionResult> {
    const { over } = this.#guest;
    if (over !== null) return refused(over.error ?? new RoomError("this table is closed", "CLOSED"));
    if (typeof (action as Action | null)?.actionType !== "string") {
      return refused(new TypeError("an action has an actionType, which is text"));
    }
    try {
      const id = this.#guest.act(this.#world.now(), action as Payload, options);
      const waiting = this.#waiting.get(id) ?? newWaiting();
      this.#waiting.set(id, waiting);
      this.#advance();
      return waiting.promise;
    } catch (error) {
      return refused(error as Error); // it cannot be said in JSON
    }
  }

  /** Ask for the whole state anew. */
  requestSnapshot(): void {
    this.#guest.requestSnapshot(this.#world.now());
    this.#advance();
  }

  /** Leave. Nobody hears what became of actions that are on their way. */
  close(): void {
    this.#guest.stop();
    this.#advance();
  }

  // --- doing what is to be done -----------------------------------------------------------------

  /** Do all that can be done now, and come back when there may be more. */
  #advance(): void {
    if (this.#isAdvancing) return; // by a listener: whoever called it goes on
    this.#isAdvancing = true;
    this.#callOff();
    // Whatever goes wrong, it comes back.
    let withinMs: number | null = AGAIN_MS;
    try {
      for (;;) {
        const step = this.#guest.next(this.#world.now());
        if (step.step === "wait") {
          withinMs = step.withinMs;
          break;
        }
        if (step.step === "over") withinMs = null;
        this.#do(step);
        if (step.step === "over") break;
      }
    } finally {
      this.#isAdvancing = false;
      if (withinMs !== null) this.#callOff = this.#world.later(withinMs, () => this.#advance());
    }
  }

  #do(step: Exclude<RoomStep, { step: "wait" }>): void {
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

  #hangUp(): void {
    const line = this.#line;
    this.#line = null;
    line?.hangUp();
  }

  #finish(error: RoomError | null): void {
    if (error === null || this.#isTold) return;
    this.#isTold = true;
    for (const listener of this.#listeners) call(() => listener.onError?.(error));
  }

  #hearing(): Hears {
    const about = (line: Line, hear: (now: number) => void): void => {
      if (line !== this.#line) return;
      try {
        hear(this.#world.now());
      } finally {
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

function told<S>(listener: RoomListener<S>, news: News): void {
  switch (news.type) {
    case "state":
      listener.onState?.(news.state as RoomState<S>);
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
function call(listener: () => void): void {
  try {
    listener();
  } catch (error) {
    queueMicrotask(() => {
      throw error;
    });
  }
}

function refused(error: Error): Promise<ActionResult> {
  const { promise, settle } = newWaiting();
  settle(error);
  return promise;
}

function newWaiting(): Waiting {
  let settle: Waiting["settle"] = () => undefined;
  const promise = new Promise<ActionResult>((resolve, reject) => {
    settle = (answer) => (answer instanceof Error ? reject(answer) : resolve(answer));
  });
  promise.catch(() => undefined); // whoever does not wait is not told; Node would end for it
  return { promise, settle };
}

// --- settings -----------------------------------------------------------------------------------

function guestOf(options: RoomOptions, world: RoomWorld): Guest {
  const { tableId, token, clientId, clientSeq, timeoutMs, spectate = false } = options;
  if (!tableId) throw new TypeError("tableId is empty: which table?");
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
    optimistic: (options.optimistic as ((state: unknown, action: Payload) => unknown)) ?? null,
  });
}

const LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789";

function letters(count: number): string {
  const bytes = new Uint8Array(count);
  // Node 18 has none at hand. They are to be different, and no secret.
  if (typeof crypto === "undefined") bytes.forEach((_, at) => (bytes[at] = Math.random() * 256));
  else crypto.getRandomValues(bytes);
  return Array.from(bytes, (byte) => LETTERS[byte % LETTERS.length]).join("");
}
