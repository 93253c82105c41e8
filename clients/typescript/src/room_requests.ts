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
  readonly asked: number;
  readonly until: number;
  notBefore: number;
  isSent: boolean;
  /** Or may have been, by whomever, under this id. */
  wasSent: boolean;
  /** On top of a state that does not have it. */
  isShown: boolean;
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
  /** Why nothing could be sent since then; empty, if nobody knows. */
  readonly whyUnsent: (since: number) => string;
}

export class Requests {
  readonly #terms: RoomTerms;
  readonly #options: RequestsOptions;
  readonly #backoff: Backoff;
  readonly #numbers = new Map<string, number | null>();
  readonly #sent = new Set<string>(); // of those whose numbers are remembered
  readonly #brought = new Set<string>(); // of those, too: others made them, and may have sent them
  readonly #unanswered = new Set<string>(); // the last ones of this connection
  #seq: number | null;
  #isIn = false;
  #isCurrent = true; // what is confirmed is of the history of this connection
  #mostBytes: number | null = null;
  #queue: Request[] = [];
  #done: Request[] = []; // and not seen yet
  #reached = 0;
  #reachedAt = -Infinity;
  #told = 0; // so far by this connection
  #doneBefore: readonly Request[] = [];

  constructor(terms: RoomTerms, chance: () => number, options: RequestsOptions) {
    this.#terms = terms;
    this.#options = options;
    this.#seq = options.seq;
    this.#backoff = new Backoff(terms, chance);
  }

  get pending(): number {
    return this.#done.length + this.#queue.length;
  }

  /** Does somebody wait for an answer? */
  get isAwaited(): boolean {
    return this.#queue.length > 0;
  }

  /** Is nothing on its way, and everything to be seen that was answered? */
  isSettled(version: number | null): boolean {
    return this.#queue.length === 0 && version !== null && version >= this.#reached;
  }

  // --- asking -----------------------------------------------------------------------------------

  /**
   * The request on its way that is the same as this one. Whoever names one that was asked before
   * means that one, whatever is on its way for the same.
   */
  twin(guard: string | null, requestId: string | null): string | null {
    const isAgain = requestId !== null && this.#numbers.has(requestId);
    const isTwin = ({ id, guard: theirs }: Request): boolean =>
      id === requestId || (guard !== null && theirs === guard && !isAgain);
    return this.#queue.find(isTwin)?.id ?? null;
  }

  /** `isNew`: the id was made for it, and nobody has had it before. */
  add(now: number, id: string, action: Payload, guard: string | null, isNew: boolean): void {
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
    } else if (!this.#sent.has(id)) {
      this.#numbers.delete(id); // nobody has seen it, and later ones may have been taken
    }
    const wasSent = this.#sent.has(id) || this.#brought.has(id);
    const request: Request = {
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
    if (this.#isTooLarge(request)) return;
    this.#queue.push(request);
    this.#options.changed();
    this.#pursue(now);
  }

  #number(id: string): number | null {
    if (!this.#numbers.has(id)) {
      if (this.#seq !== null) this.#seq += 1;
      this.#numbers.set(id, this.#seq);
    }
    if (this.#numbers.size > REMEMBERED + this.#queue.length) {
      this.#forgetNumbers(new Set([id, ...this.#queue.map((request) => request.id)]));
    }
    return this.#numbers.get(id) ?? null;
  }

  /** The oldest, but none that is on its way. */
  #forgetNumbers(needed: ReadonlySet<string>): void {
    for (const oldest of [...this.#numbers.keys()].filter((each) => !needed.has(each))) {
      if (this.#numbers.size <= REMEMBERED) return;
      this.#numbers.delete(oldest);
      this.#sent.delete(oldest);
      this.#brought.delete(oldest);
    }
  }

  /** If it is, it is settled: the server would not even say to whom it says so. */
  #isTooLarge(request: Request): boolean {
    const most = this.#mostBytes;
    if (most === null) return false;
    const size = new TextEncoder().encode(spoken(this.#message(request))).length;
    if (size <= most) return false;
    const said = `the message has ${size} bytes, and the server takes ${most}`;
    const answer = new ActionError("TOO_LARGE", said, request.id, request.wasSent);
    this.#options.emit({ step: "settle", requestId: request.id, answer });
    return true;
  }

  #pursue(now: number): void {
    const [first] = this.#queue;
    if (!this.#isIn || first === undefined || first.isSent || now < first.notBefore) return;
    first.isSent = true;
    first.wasSent = true;
    this.#sent.add(first.id);
    this.#unanswered.add(first.id);
    const [oldest] = this.#unanswered;
    if (this.#unanswered.size > REMEMBERED && oldest !== undefined) this.#unanswered.delete(oldest);
    this.#options.emit({ step: "send", message: this.#message(first) });
  }

  #message({ id, seq, action }: Request): Payload {
    const { tableId, clientId } = this.#options;
    const numbered = seq === null ? {} : { clientId, clientSeq: seq };
    return { type: "ACTION_REQUEST", requestId: id, ...numbered, payload: { ...action, tableId } };
  }

  // --- the connection ---------------------------------------------------------------------------

  /** `mostBytes` of a message, if the server has said so; `at` is the confirmed version. */
  joined(now: number, mostBytes: number | null, resumed: boolean, at: number): void {
    const before = this.pending;
    this.#isIn = true;
    this.#isCurrent = resumed;
    if (resumed) this.#done = this.#done.filter(({ version }) => version > at);
    this.#told = 0;
    this.#doneBefore = this.#done;
    this.#mostBytes = mostBytes;
    this.#queue = this.#queue.filter((request) => !this.#isTooLarge(request));
    if (this.pending < before) this.#options.changed();
    this.#pursue(now);
  }

  /** What was sent may not have come, or its answer may not: it is sent again. */
  lost(): void {
    this.#isIn = false;
    this.#unanswered.clear();
    for (const request of this.#queue) request.isSent = false;
  }

  // --- answers ----------------------------------------------------------------------------------

  /** The answer to a request; `at` is the version that is confirmed. */
  result(now: number, requestId: string | null, payload: Payload, at: number): void {
    const version = whole(payload["stateVersion"]) ?? 0;
    const { error, reply = null, action = null } = payload;
    const request = this.#answered(requestId);
    if (request === undefined) {
      // Too late to be told, but that far it is.
      if (this.#numbers.has(requestId ?? "")) this.#reach(now, version);
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
    if (!wasShown || !this.#done.includes(request)) this.#options.changed();
    this.#next(now);
  }

  /** A request was answered with an error that is no result: was it ours? */
  refused(now: number, requestId: string | null, error: Payload): boolean {
    const request = this.#answered(requestId);
    if (request !== undefined) this.#failed(now, request, error, 0);
    return request !== undefined;
  }

  #answered(requestId: string | null): Request | undefined {
    this.#unanswered.delete(requestId ?? "");
    return this.#queue.find(({ id }) => id === requestId);
  }

  /** The one request that the server may be talking of, if there is one and no other. */
  unanswered(): string | null {
    const [only, ...others] = this.#unanswered;
    return only === undefined || others.length > 0 ? null : only;
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
    this.#told = Math.max(this.#told, version);
    if (version <= this.#reached) return;
    this.#reached = version;
    this.#reachedAt = now;
  }

  // --- what is shown ----------------------------------------------------------------------------

  /** The confirmed state is this far, by what was done for this request. */
  updated(version: number, requestId: string | null): void {
    this.#isCurrent = true;
    this.#done = this.#done.filter((each) => each.version > version && each.id !== requestId);
    for (const request of this.#done) request.isShown = true;
    for (const request of this.#queue) request.isShown &&= request.id !== requestId;
  }

  /** The confirmed state is this far, and may have whatever was sent. */
  replaced(version: number): void {
    this.updated(version, null);
    for (const request of this.#queue) request.isShown &&= !request.wasSent;
  }

  /** What was done may have been taken back: the confirmed state is all that counts. */
  forget(): void {
    this.#done = [];
    this.#reached = this.#told = 0;
  }

  /** The same for what was told by connections before; what this one has told is so. */
  forgetBefore(): void {
    this.#done = this.#done.filter((request) => !this.#doneBefore.includes(request));
    this.#reached = this.#told;
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
    for (const { action } of [...this.#done, ...this.#queue].filter(({ isShown }) => isShown)) {
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
    // All have the same time, so the first is late before the others.
    const due = this.#queue.findIndex(({ until }) => now < until);
    const late = this.#queue.splice(0, due < 0 ? this.#queue.length : due);
    for (const { id, wasSent, asked } of late) {
      const why = this.#options.whyUnsent(asked);
      const answer = new ActionTimeoutError(id, this.#terms.timeoutMs, wasSent, why);
      this.#options.emit({ step: "settle", requestId: id, answer });
    }
    if (late.length > 0) this.#options.changed();
    this.#pursue(now);
  }

  due(): number {
    const [first] = this.#queue;
    if (first === undefined) return Infinity;
    return this.#isIn && !first.isSent ? Math.min(first.until, first.notBefore) : first.until;
  }

  end(error: RoomError): void {
    const queue = this.#queue;
    this.#queue = [];
    for (const { id } of queue) {
      this.#options.emit({ step: "settle", requestId: id, answer: error });
    }
    if (queue.length > 0) this.#options.changed();
  }
}
