/**
 * How a client sits at a table: messages, clicks and time in; messages, news and answers out.
 *
 * `Guest.next` says what to do: open a connection, send, hand something over, wait. Whoever does it
 * tells how it went: `opened`, `received`, `closed`. Nothing here waits, sends or guesses, so the
 * Python client (room_rules.py) is the same; clients/vectors/room holds both to it.
 *
 * Its promise: what is confirmed is what the server has, at that version; each event is handed over
 * once, after the state it belongs to; each request is answered once, and done at most once. What the
 * table is said to be is in room_replica, what is wanted of it in room_requests.
 */

import {
  type Message,
  type RoomUpdate,
  guardOf,
  isMapping,
  messageOf,
  presenceOf,
  spanMs,
  text,
  whole,
} from "./room_reading.js";
import { Replica } from "./room_replica.js";
import { type Optimistic, Requests } from "./room_requests.js";
import {
  Backoff,
  type HangUpWhy,
  type News,
  type Payload,
  RoomError,
  type RoomStatus,
  type RoomStep,
  type RoomTerms,
  type TurnedAway,
} from "./room_values.js";
import { parsed, printed } from "./rules.js";

// So many heartbeats long, somebody who is there says something.
const PATIENCE = 2.5;

// Results that were handed over, and may come again.
const REMEMBERED = 64;

// So many connections, at least, are tried in the time that an action has.
const TRIES = 5;

const CLOSED = "closed before an answer came: the outcome is unknown";
const ANOTHER = "joined as somebody else before an answer came: the outcome is unknown";

// What a server says of a message that it could not read, so that it may not know whose it was.
const UNREAD: ReadonlySet<string> = new Set(["INVALID", "TOO_LARGE"]);

const GOING_AWAY = 1001;
const TRY_LATER = 1013;

export interface GuestOptions {
  readonly tableId: string;
  readonly terms: RoomTerms;
  /** A number from 0 to 1. */
  readonly chance: () => number;
  /** Six random ones. */
  readonly letters: () => string;
  /** Milliseconds since 1970. */
  readonly wall: () => number;
  readonly clientId: string;
  /**
   * The number of the last request that was made under this `clientId`; null if nobody knows, and
   * requests have no numbers.
   */
  readonly seq?: number | null;
  readonly spectate?: boolean;
  /** The next token may be another. */
  readonly renews?: boolean;
  readonly optimistic?: Optimistic | null;
}

export interface Acting {
  /** What another click for the same has, too: the action itself (true), a name, or nothing. */
  readonly guard?: string | boolean;
  /** That of a request which was given up: it is not done twice. */
  readonly requestId?: string | null;
}

interface Again {
  /** Nobody comes back sooner. */
  readonly isToldWhen: boolean;
  readonly turnedAway: TurnedAway | null;
}

/** Sits at one table, over one connection after the other. */
export class Guest {
  status: RoomStatus = "connecting";
  turnedAway: TurnedAway | null = null;
  state: unknown = null;
  over: Extract<RoomStep, { step: "over" }> | null = null;
  readonly #options: GuestOptions;
  readonly #terms: RoomTerms;
  readonly #replica: Replica;
  readonly #requests: Requests;
  readonly #backoff: Backoff;
  readonly #steps: RoomStep[] = [];
  #phase: "waiting" | "opening" | "joining" | "open" = "waiting";
  #until = -Infinity;
  #isToldWhen = false; // to come back: nobody comes sooner
  #silenceMs: number;
  #rushed = false;
  #joinId = "";
  #token: string | null = null;
  #tokenRefused: TurnedAway | null = null;
  #results: string[] = [];
  #user: string | null | undefined = undefined; // as whom we were in last

  constructor(options: GuestOptions) {
    const { tableId, terms, chance, clientId, seq = 0, optimistic = null } = options;
    this.#options = options;
    this.#terms = terms;
    this.#silenceMs = PATIENCE * terms.heartbeatMs;
    this.#backoff = new Backoff(terms, chance);
    const emit = (step: RoomStep): void => void this.#steps.push(step);
    this.#requests = new Requests(terms, chance, {
      tableId,
      clientId,
      seq,
      optimistic,
      emit,
      changed: () => this.#show(),
      stale: (now) => this.#replica.want(now, "stale"),
    });
    this.#replica = new Replica(tableId, terms, chance, {
      emit,
      newId: () => this.#newId(),
      moved: (update) => this.#moved(update),
      forked: (followsJoin) => {
        if (followsJoin) this.#requests.forgetBefore();
        else this.#requests.forget();
      },
    });
  }

  // --- how things stand -------------------------------------------------------------------------

  get confirmed(): unknown {
    return this.#replica.state;
  }

  get version(): number | null {
    return this.#replica.version;
  }

  get cursor(): string | null {
    const { position } = this.#replica;
    return position === null ? null : printed(position);
  }

  get viewer(): string | null {
    return this.#replica.viewer;
  }

  get pending(): number {
    return this.#requests.pending;
  }

  /** Is there a state, nothing on its way, and all to be seen that was answered? */
  get isSettled(): boolean {
    return this.#requests.isSettled(this.version);
  }

  // --- what to do next --------------------------------------------------------------------------

  next(now: number): RoomStep {
    if (this.over === null) this.#tick(now);
    const step = this.#steps.shift() ?? this.over;
    if (step !== null) return step;
    const due = Math.min(this.#until, this.#requests.due(), this.#replica.due());
    return { step: "wait", withinMs: Math.max(0, due - now) };
  }

  #tick(now: number): void {
    this.#requests.tick(now);
    this.#replica.tick(now);
    if (now < this.#until) return;
    if (this.#phase !== "waiting") {
      this.#again(now, "silence", this.#pauseMs());
      return;
    }
    this.#phase = "opening";
    this.#until = now + this.#terms.connectMs;
    this.#become("connecting", this.turnedAway);
    this.#steps.push({ step: "open", withinMs: this.#terms.connectMs });
  }

  // --- what the user wants ----------------------------------------------------------------------

  /** Ask for this to be done; the id of the request, which may be one on its way. */
  act(now: number, action: Payload, { guard = true, requestId = null }: Acting = {}): string {
    // As it is now: who changes it later does not change what is sent again.
    const said = JSON.parse(JSON.stringify(action)) as Payload;
    const key = guard === true ? guardOf(said) : guard || null;
    const twin = this.#requests.twin(key, requestId || null);
    if (twin !== null) return twin;
    const id = requestId || this.#newId();
    this.#requests.add(now, id, said, key, !requestId);
    this.#hurry(now);
    return id;
  }

  requestSnapshot(now: number): void {
    if (this.over === null) this.#replica.want(now, "manual");
  }

  stop(): void {
    if (this.over !== null) return;
    this.#end("closed", null);
    // What is still to be done is of no use to whoever leaves, but for answers.
    const answers = this.#steps.filter(({ step }) => step === "settle");
    this.#steps.splice(0, this.#steps.length, ...answers);
    this.#deliver({ type: "became", status: "closed", turnedAway: null });
  }

  /** What is wrong will be wrong again. */
  fail(error: RoomError, turnedAway: TurnedAway | null = null): void {
    this.#end("failed", error, turnedAway);
  }

  #end(status: RoomStatus, error: RoomError | null, turnedAway: TurnedAway | null = null): void {
    if (this.over !== null) return;
    this.#requests.end(error ?? new RoomError(CLOSED, "CLOSED"));
    this.#become(status, turnedAway);
    this.over = { step: "over", error };
  }

  // --- the connection ---------------------------------------------------------------------------

  opened(now: number, token: string | null): void {
    if (this.over !== null || this.#phase !== "opening") return;
    if (this.#tokenRefused !== null && token === this.#token) {
      this.#turnedAwayForGood(this.#tokenRefused);
      return;
    }
    this.#phase = "joining";
    this.#until = now + this.#terms.connectMs;
    this.#token = token;
    this.#joinId = this.#newId();
    const { tableId, spectate = false } = this.#options;
    const told = { tableId, cursor: this.cursor, token, spectate: spectate || null };
    const payload = Object.fromEntries(Object.entries(told).filter(([, found]) => found !== null));
    const message = { type: "JOIN", requestId: this.#joinId, payload };
    this.#steps.push({ step: "send", message });
  }

  /** The connection is over, or there is none: cut, ended, refused. */
  closed(now: number, code: number | null = null): void {
    if (this.over !== null || this.#phase === "waiting") return;
    if (code === GOING_AWAY && !this.#rushed) {
      this.#rushed = true;
      this.#again(now, "drained", this.#options.chance() * this.#terms.backoffMs);
    } else if (code === TRY_LATER) {
      const pause = 2 * this.#terms.backoffMs + this.#pauseMs();
      this.#again(now, "overloaded", pause, { isToldWhen: true });
    } else {
      this.#again(now, "ended", this.#pauseMs());
    }
  }

  received(now: number, said: unknown): void {
    if (this.over !== null || !["joining", "open"].includes(this.#phase)) return;
    if (this.#phase === "open") this.#until = now + this.#silenceMs;
    const message = messageOf(said);
    const { tableId } = this.#options;
    if (message === null) {
      this.#replica.want(now, "gap"); // whatever it was, it is lost
    } else if ([undefined, tableId].includes(message.payload["tableId"] as string | undefined)) {
      this.#take(now, message);
    }
  }

  #pauseMs(): number {
    return this.#backoff.pauseMs(this.#mostMs());
  }

  /** Whoever waits for an answer has only so long; the others need not come together. */
  #mostMs(): number {
    return this.#requests.isAwaited ? this.#terms.timeoutMs / TRIES : Infinity;
  }

  /** The pause was made when nobody waited for an answer; now somebody does. */
  #hurry(now: number): void {
    if (this.#phase !== "waiting" || !this.#requests.isAwaited || this.#isToldWhen) return;
    this.#until = Math.min(this.#until, now + this.#backoff.sameMs(this.#mostMs()));
  }

  #again(
    now: number,
    why: HangUpWhy,
    afterMs: number,
    { isToldWhen = false, turnedAway = null }: Partial<Again> = {},
  ): void {
    this.#phase = "waiting";
    this.#until = now + afterMs;
    this.#isToldWhen = isToldWhen;
    this.#replica.lost();
    this.#requests.lost();
    this.#steps.push({ step: "hang up", afterMs, why });
    this.#become("waiting", turnedAway);
  }

  // --- messages ---------------------------------------------------------------------------------

  #take(now: number, { kind, requestId, payload }: Message): void {
    switch (kind) {
      case "JOINED":
        this.#joined(now, payload);
        break;
      case "TABLE_STATE_UPDATE":
        this.#replica.update(now, payload, requestId);
        break;
      case "TABLE_SNAPSHOT":
        this.#replica.snapshot(now, payload, requestId === this.#joinId ? null : requestId);
        break;
      case "ACTION_RESULT":
        this.#requests.result(now, requestId, payload, this.version ?? 0);
        break;
      case "HEARTBEAT":
        this.#heartbeat(now, payload);
        break;
      case "HAND_RESULT":
        this.#result(payload);
        break;
      case "PRESENCE":
        this.#presence(payload);
        break;
      case "ERROR":
        this.#error(now, requestId, payload);
        break;
      case "LEFT":
        // Whether we may come back is said when we do.
        this.#again(now, "left", this.#pauseMs());
        break;
    }
  }

  #joined(now: number, payload: Payload): void {
    if (this.#phase !== "joining") return;
    const heartbeatMs = spanMs(payload["heartbeatMs"]) ?? this.#terms.heartbeatMs;
    this.#silenceMs = PATIENCE * heartbeatMs;
    this.#phase = "open";
    this.#until = now + this.#silenceMs;
    this.#tokenRefused = null;
    this.#become("open");
    const resumed = payload["resumed"] === true;
    const viewer = text(payload["viewer"]) || null;
    if (this.#user !== undefined && this.#user !== viewer) {
      // An id belongs to its user: what is sent again by another one is done again.
      this.#replica.forget();
      this.#requests.forget();
      this.#requests.end(new RoomError(ANOTHER, "CLOSED"));
      this.state = null;
    }
    this.#user = viewer;
    this.#replica.joined(now, resumed, parsed(payload["head"]));
    this.#requests.joined(now, whole(payload["messageBytes"]) || null, resumed, this.version ?? 0);
  }

  #heartbeat(now: number, { heads }: Payload): void {
    const head = isMapping(heads) ? parsed(heads[this.#options.tableId]) : null;
    this.#steady();
    this.#replica.heard(now, head);
    if (head !== null && printed(head) === this.cursor) {
      this.#requests.forgetLate(now, head.offset);
    }
  }

  #result(payload: Payload): void {
    const version = whole(payload["stateVersion"]);
    const at = text(payload["position"], String(version));
    if (version === null || this.#results.includes(at)) return;
    this.#results = [...this.#results, at].slice(-REMEMBERED);
    const { result = null } = payload;
    this.#deliver({ type: "result", result: { version, result } });
  }

  #presence(payload: Payload): void {
    const presence = presenceOf(payload);
    if (presence !== null) this.#deliver({ type: "presence", presence });
  }

  #error(now: number, requestId: string | null, payload: Payload): void {
    const code = text(payload["code"], "FAILED");
    const message = text(payload["message"]);
    const afterMs = spanMs(payload["retryAfterMs"]);
    const about = requestId ?? (UNREAD.has(code) ? this.#meant(code) : null);
    const isJoin = this.#phase === "joining" && about === this.#joinId;
    if (isJoin || this.#replica.refused(now, about, afterMs)) {
      const turnedAway = { code, message };
      if (code === "UNAUTHORIZED") this.#unauthorized(now, turnedAway);
      else if (isJoin && payload["retry"] === true) this.#turnedAwayForNow(now, turnedAway, afterMs);
      else if (isJoin) this.#turnedAwayForGood(turnedAway);
    } else if (!this.#requests.refused(now, about, payload)) {
      this.#deliver({ type: "trouble", code, message });
    }
  }

  /** What the server could not read, and so cannot name: if it can be only one. */
  #meant(code: string): string | null {
    if (this.#phase === "joining") return code === "TOO_LARGE" ? this.#joinId : null;
    return this.#replica.isAsking ? null : this.#requests.unanswered();
  }

  #turnedAwayForNow(now: number, turnedAway: TurnedAway, afterMs: number | null): void {
    if (afterMs === null) {
      this.#again(now, "ended", this.#pauseMs(), { turnedAway });
    } else {
      // Nobody comes sooner than told, and not all together.
      const pause = afterMs + this.#options.chance() * this.#terms.backoffMs;
      this.#again(now, "told", pause, { isToldWhen: true, turnedAway });
    }
  }

  #turnedAwayForGood(turnedAway: TurnedAway): void {
    const { code, message } = turnedAway;
    this.fail(new RoomError(message === "" ? code : `${code}: ${message}`, code), turnedAway);
  }

  #unauthorized(now: number, turnedAway: TurnedAway): void {
    if (!(this.#options.renews ?? false)) {
      this.#turnedAwayForGood(turnedAway);
      return;
    }
    this.#tokenRefused = turnedAway;
    const rushed = this.#rushed;
    this.#rushed = true;
    this.#again(now, "unauthorized", rushed ? this.#pauseMs() : 0, { turnedAway });
  }

  // --- what follows from it ---------------------------------------------------------------------

  #moved(update: RoomUpdate | null): void {
    const version = this.version ?? 0;
    this.#steady();
    if (update === null) this.#requests.replaced(version);
    else this.#requests.updated(version, update.requestId);
    this.#show();
    for (const data of update?.events ?? []) {
      this.#deliver({ type: "event", event: { version, data } });
    }
  }

  #show(): void {
    const { confirmed, version, viewer, pending } = this;
    if (version === null) return;
    const state = this.#requests.shown(confirmed);
    this.state = state;
    this.#deliver({ type: "state", state: { state, confirmed, version, viewer, pending } });
  }

  /** The connection is good for something: what went wrong before is forgotten. */
  #steady(): void {
    this.#backoff.reset();
    this.#rushed = false;
  }

  #become(status: RoomStatus, turnedAway: TurnedAway | null = null): void {
    this.turnedAway = turnedAway;
    if (this.status === status) return;
    this.status = status;
    this.#deliver({ type: "became", status, turnedAway });
  }

  #deliver(news: News): void {
    this.#steps.push({ step: "deliver", news });
  }

  #newId(): string {
    const { clientId, letters, wall } = this.#options;
    return `${clientId}-${Math.floor(wall())}-${letters()}`;
  }
}
