/**
 * How a client sits at a table: messages, clicks and time in; messages, news and answers out.
 *
 * `Guest.next` says what to do: open a connection, send, hand something over, wait. Whoever does it
 * tells how it went: `opened`, `received`, `closed`. Nothing here waits, sends or guesses, so the
 * Python client (room_rules.py) is the same; clients/vectors/room holds both to it.
 *
 * Its promise: what is confirmed is what the server has, at that version; each event is handed over
 * once, after the state it belongs to; each request is answered once, and done at most once. What the
 * table is said to be is in room_replica, what is wanted of it in room_requests, and how one gets in,
 * and in again, in room_connection.
 */

import { Connection } from "./room_connection.js";
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
  type News,
  type Payload,
  RoomError,
  type RoomStatus,
  type RoomStep,
  type RoomTerms,
  type TurnedAway,
} from "./room_values.js";
import { parsed, printed } from "./rules.js";

// Results that were handed over, and may come again.
const REMEMBERED = 64;

const CLOSED = "closed before an answer came: the outcome is unknown";
const ANOTHER = "joined as somebody else before an answer came: the outcome is unknown";

// What a server says of a message that it could not read, so that it may not know whose it was.
const UNREAD: ReadonlySet<string> = new Set(["INVALID", "TOO_LARGE"]);

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

/** Sits at one table, over one connection after the other. */
export class Guest {
  state: unknown = null;
  readonly #options: GuestOptions;
  readonly #replica: Replica;
  readonly #requests: Requests;
  readonly #connection: Connection;
  readonly #steps: RoomStep[] = [];
  #results: string[] = [];
  #user: string | null | undefined = undefined; // as whom we were in last

  constructor(options: GuestOptions) {
    const { tableId, terms, chance, clientId, seq = 0, optimistic = null } = options;
    const { spectate = false, renews = false } = options;
    this.#options = options;
    const emit = (step: RoomStep): void => void this.#steps.push(step);
    this.#connection = new Connection(terms, chance, {
      tableId,
      spectate,
      renews,
      emit,
      cursor: () => this.cursor,
      newId: () => this.#newId(),
      isAwaited: () => this.#requests.isAwaited,
      lost: () => {
        this.#replica.lost();
        this.#requests.lost();
      },
      ended: (error) => this.#requests.end(error ?? new RoomError(CLOSED, "CLOSED")),
    });
    this.#requests = new Requests(terms, chance, {
      tableId,
      clientId,
      seq,
      optimistic,
      emit,
      changed: () => this.#show(),
      stale: (now) => this.#replica.want(now, "stale"),
      whyUnsent: (since) => this.#connection.whyNotIn(since),
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

  get status(): RoomStatus {
    return this.#connection.status;
  }

  get turnedAway(): TurnedAway | null {
    return this.#connection.turnedAway;
  }

  get over(): Connection["over"] {
    return this.#connection.over;
  }

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
    const due = Math.min(this.#connection.due(), this.#requests.due(), this.#replica.due());
    return { step: "wait", withinMs: Math.max(0, due - now) };
  }

  #tick(now: number): void {
    this.#requests.tick(now);
    this.#replica.tick(now);
    this.#connection.tick(now);
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
    this.#connection.hurry(now);
    return id;
  }

  requestSnapshot(now: number): void {
    if (this.over === null) this.#replica.want(now, "manual");
  }

  stop(): void {
    if (this.over !== null) return;
    this.#connection.end("closed", null);
    // What is still to be done is of no use to whoever leaves, but for answers.
    const answers = this.#steps.filter(({ step }) => step === "settle");
    this.#steps.splice(0, this.#steps.length, ...answers);
    this.#deliver({ type: "became", status: "closed", turnedAway: null });
  }

  /** What is wrong will be wrong again. */
  fail(error: RoomError): void {
    this.#connection.end("failed", error);
  }

  // --- the connection ---------------------------------------------------------------------------

  opened(now: number, token: string | null): void {
    this.#connection.opened(now, token);
  }

  /** The connection is over, or there is none: cut, ended, refused. */
  closed(now: number, code: number | null = null, reason = ""): void {
    this.#connection.closed(now, code, reason);
  }

  received(now: number, said: unknown): void {
    if (!this.#connection.isHeard) return;
    this.#connection.heard(now);
    const message = messageOf(said);
    const { tableId } = this.#options;
    if (message === null) {
      this.#replica.want(now, "gap"); // whatever it was, it is lost
    } else if ([undefined, tableId].includes(message.payload["tableId"] as string | undefined)) {
      this.#take(now, message);
    }
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
        this.#replica.snapshot(now, payload, requestId === this.#connection.joinId ? null : requestId);
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
        this.#connection.left(now, text(payload["reason"]));
        break;
    }
  }

  #joined(now: number, payload: Payload): void {
    if (!this.#connection.isJoining) return;
    this.#connection.joined(now, spanMs(payload["heartbeatMs"]));
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
    this.#connection.steady();
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
    const turnedAway = { code, message };
    if (this.#connection.isJoining && about === this.#connection.joinId) {
      this.#connection.refused(now, turnedAway, payload["retry"] === true, afterMs);
    } else if (this.#replica.refused(now, about, afterMs)) {
      if (code === "UNAUTHORIZED") this.#connection.unauthorized(now, turnedAway);
    } else if (!this.#requests.refused(now, about, payload)) {
      this.#deliver({ type: "trouble", code, message });
    }
  }

  /** What the server could not read, and so cannot name: if it can be only one. */
  #meant(code: string): string | null {
    if (this.#connection.isJoining) return code === "TOO_LARGE" ? this.#connection.joinId : null;
    return this.#replica.isAsking ? null : this.#requests.unanswered();
  }

  // --- what follows from it ---------------------------------------------------------------------

  #moved(update: RoomUpdate | null): void {
    const version = this.version ?? 0;
    this.#connection.steady();
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

  #deliver(news: News): void {
    this.#steps.push({ step: "deliver", news });
  }

  #newId(): string {
    const { clientId, letters, wall } = this.#options;
    return `${clientId}-${Math.floor(wall())}-${letters()}`;
  }
}
