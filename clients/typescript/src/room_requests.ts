/**
 * What a client wants done at a table, until it is: one request after the other, each once.
 *
 * A request keeps its id and its number, however often it is sent: after a reconnect, and when the
 * server says that nothing was decided. It ends with an answer, or when its time is up. Until the
 * confirmed state shows what came of it, it is shown on top of that. Nothing here waits or sends;
 * room_requests.py is its twin.
 */

import { isMapping, spanMs, text, whole } from "./room_reading.js";
import {
  ActionError,
  ActionTimeoutError,
  Backoff,
  type Emit,
  type Payload,
  type RoomError,
  type RoomTerms,
} from "./room_values.js";

/** What a state becomes when an action is done, as far as this client can tell. */
export type Optimistic = (state: unknown, action: Payload) => unknown;

// Whose numbers are remembered, for those who ask again.
const REMEMBERED = 256;

/** An action on its way. */
interface Request {
  readonly id: string;
  readonly seq: number | null;
  readonly action: Payload;
  readonly guard: string | null;
  readonly until: number;
  notBefore: number;
  isSent: boolean;
  wasSent: boolean;
  /** From which on the confirmed state shows it. */
  version: number;
}

export interface RequestsOptions {
  readonly tableId: string;
  readonly clientId: string;
  /** The number of the last request of this client; null if they have no numbers. */
  readonly seq: number | null;
  readonly optimistic: Optimistic | null;
  readonly emit: Emit;
  /** What is pending has changed. */
  readonly changed: () => void;
  /** A snapshot is needed. */
  readonly stale: (now: number) => void;
}

export class Requests {
  readonly #terms: RoomTerms;
  readonly #options: RequestsOptions;
  readonly #backoff: Backoff;
  readonly #numbers = new Map<string, number | null>();
  #seq: number | null;
  #isIn = false;
  #queue: Request[] = [];
  #done: Request[] = []; // and not seen yet
  #reached = 0;
  #reachedAt = -Infinity;

  constructor(terms: RoomTerms, chance: () => number, options: RequestsOptions) {
    this.#terms = terms;
    this.#options = options;
    this.#seq = options.seq;
    this.#backoff = new Backoff(terms, chance);
  }

  get pending(): number {
    return this.#done.length + this.#queue.length;
  }

  /** Is nothing on its way, and everything to be seen that was answered? */
  isSettled(version: number | null): boolean {
    return this.#queue.length === 0 && version !== null && version >= this.#reached;
  }

  // --- asking -----------------------------------------------------------------------------------

  /** The request on its way that is the same as this one. */
  twin(guard: string | null, requestId: string | null): string | null {
    const isTwin = ({ id, guard: theirs }: Request): boolean =>
      id === requestId || (guard !== null && theirs === guard);
    return this.#queue.find(isTwin)?.id ?? null;
  }

  add(now: number, id: string, action: Payload, guard: string | null): void {
    const until = now + this.#terms.timeoutMs;
    const unsent = { notBefore: -Infinity, isSent: false, wasSent: false, version: 0 };
    this.#queue.push({ id, seq: this.#number(id), action, guard, until, ...unsent });
    this.#options.changed();
    this.#pursue(now);
  }

  #number(id: string): number | null {
    if (!this.#numbers.has(id)) {
      if (this.#seq !== null) this.#seq += 1;
      this.#numbers.set(id, this.#seq);
    }
    const [oldest] = this.#numbers.keys();
    if (this.#numbers.size > REMEMBERED && oldest !== undefined) this.#numbers.delete(oldest);
    return this.#numbers.get(id) ?? null;
  }

  #pursue(now: number): void {
    const [first] = this.#queue;
    if (!this.#isIn || first === undefined || first.isSent || now < first.notBefore) return;
    first.isSent = true;
    first.wasSent = true;
    this.#options.emit({ step: "send", message: this.#message(first) });
  }

  #message({ id, seq, action }: Request): Payload {
    const { tableId, clientId } = this.#options;
    const numbered = seq === null ? {} : { clientId, clientSeq: seq };
    return { type: "ACTION_REQUEST", requestId: id, ...numbered, payload: { ...action, tableId } };
  }

  // --- the connection ---------------------------------------------------------------------------

  joined(now: number): void {
    this.#isIn = true;
    this.#pursue(now);
  }

  /** What was sent may not have come, or its answer may not: it is sent again. */
  lost(): void {
    this.#isIn = false;
    for (const request of this.#queue) request.isSent = false;
  }

  // --- answers ----------------------------------------------------------------------------------

  /** The answer to a request; `at` is the version that is confirmed. */
  result(now: number, requestId: string | null, payload: Payload, at: number): void {
    const request = this.#queue.find(({ id }) => id === requestId);
    if (request === undefined) return;
    const version = whole(payload["stateVersion"]) ?? 0;
    const { error, reply = null, action = null } = payload;
    if (payload["success"] !== true) {
      this.#failed(now, request, isMapping(error) ? error : {}, version);
      return;
    }
    this.#reach(now, version);
    this.#remove(request);
    const cached = payload["cached"] === true;
    const answer = { requestId: request.id, reply, version, cached, action };
    this.#options.emit({ step: "settle", requestId: request.id, answer });
    if (version > at) {
      request.version = version;
      this.#done.push(request);
    } else {
      this.#options.changed();
    }
    this.#next(now);
  }

  /** A request was answered with an error that is no result: was it ours? */
  refused(now: number, requestId: string | null, error: Payload): boolean {
    const request = this.#queue.find(({ id }) => id === requestId);
    if (request !== undefined) this.#failed(now, request, error, 0);
    return request !== undefined;
  }

  #failed(now: number, request: Request, error: Payload, version: number): void {
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
    if (code === "STATE_STALE_VERSION") this.#options.stale(now);
    this.#next(now);
  }

  #remove(request: Request): void {
    this.#queue = this.#queue.filter((each) => each !== request);
  }

  #next(now: number): void {
    this.#backoff.reset();
    this.#pursue(now);
  }

  #reach(now: number, version: number): void {
    if (version <= this.#reached) return;
    this.#reached = version;
    this.#reachedAt = now;
  }

  // --- what is shown ----------------------------------------------------------------------------

  /** The confirmed state is this far. */
  seen(version: number): void {
    this.#done = this.#done.filter((request) => request.version > version);
  }

  /** What was done may have been taken back: the confirmed state is all that counts. */
  forget(): void {
    this.#done = [];
    this.#reached = 0;
  }

  /**
   * There is nothing behind this version: what should be there was taken back. Not at once: whoever
   * says so may have looked before it was done.
   */
  forgetLate(now: number, version: number): void {
    if (this.#reached <= version || now < this.#reachedAt + this.#terms.graceMs) return;
    this.forget();
    this.#options.changed();
  }

  /** The confirmed state with what is pending. */
  shown(confirmed: unknown): unknown {
    const { optimistic } = this.#options;
    if (optimistic === null) return confirmed;
    let state = confirmed;
    for (const { action } of [...this.#done, ...this.#queue]) {
      try {
        // A copy: whoever changes what they are given changes nothing here.
        state = optimistic(structuredClone(state), structuredClone(action));
      } catch {
        // It does not fit this state: it shows nothing.
      }
    }
    return state;
  }

  // --- time -------------------------------------------------------------------------------------

  tick(now: number): void {
    const late = this.#queue.filter(({ until }) => now >= until);
    this.#queue = this.#queue.filter(({ until }) => now < until);
    for (const { id, wasSent } of late) {
      const answer = new ActionTimeoutError(id, this.#terms.timeoutMs, wasSent);
      this.#options.emit({ step: "settle", requestId: id, answer });
    }
    if (late.length > 0) this.#options.changed();
    this.#pursue(now);
  }

  due(): number {
    const due = Math.min(...this.#queue.map(({ until }) => until));
    const [first] = this.#queue;
    return this.#isIn && first && !first.isSent ? Math.min(due, first.notBefore) : due;
  }

  end(error: RoomError): void {
    const queue = this.#queue;
    this.#queue = [];
    for (const { id } of queue) {
      this.#options.emit({ step: "settle", requestId: id, answer: error });
    }
  }
}
