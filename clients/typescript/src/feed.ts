/**
 * Follow a feed over HTTP: each entry once, in order, through every cut and restart.
 *
 *     for await (const event of feed("https://shop.example/feeds/job-7")) {
 *       if (event.type === "update") show(event.data);
 *       else startAgainFrom(event.state);
 *     }
 *
 * or, with functions that are called:
 *
 *     feed(url).listen({ onUpdate: (update) => show(update.data), onReset: startAgain });
 *
 * It ends when the feed does. It connects again by itself, from where it was, for as long as that
 * may help; a `FeedError` says when it does not. `cursor` can be kept and given as `after` later; it
 * stands behind the event that was handed over last.
 */

import { type Ending, type Fetch, type Request, Line, asking, openingOf } from "./line.js";
import {
  type Connect,
  type FeedEvent,
  FeedError,
  Follower,
  type Reset,
  TERMS,
  type Update,
  parsed,
} from "./rules.js";

export interface FeedOptions {
  /** A cursor: go on behind it. */
  readonly after?: string | null;
  /** The number of the last event that was seen: go on behind it. */
  readonly lastSeq?: number | null;
  /**
   * Sent with every request; a function is asked each time, so that a token can be renewed. One that
   * throws ends the feed: what may pass, it tries again by itself.
   */
  readonly headers?: HeadersInit | (() => HeadersInit | Promise<HeadersInit>);
  readonly credentials?: RequestCredentials;
  /** Ends the feed when it is aborted. */
  readonly signal?: AbortSignal;
  /** A connection that says nothing for so long is made anew. */
  readonly silenceMs?: number;
  /** So is one that does not bring in time what the server says is there. */
  readonly graceMs?: number;
  /** The size of the largest event, in bytes. */
  readonly limit?: number;
  readonly fetch?: Fetch;
  /** Time and chance, for tests. */
  readonly world?: World;
}

export interface World {
  readonly now: () => number;
  /** From 0 to 1. */
  readonly chance: () => number;
  readonly sleep?: (ms: number) => Promise<void>;
}

/** Asking; listening; between two connections; the feed has ended; closed by us; given up. */
export type Status = "connecting" | "open" | "waiting" | "ended" | "closed" | "failed";

export interface Listener {
  readonly onUpdate?: (update: Update) => void;
  readonly onReset?: (reset: Reset) => void;
  /** The feed has ended: there is nothing more, for anybody. */
  readonly onEnd?: () => void;
  readonly onError?: (error: unknown) => void;
  readonly onStatus?: (status: Status) => void;
}

/** The feed at this address, from its beginning, or from behind `after` or `lastSeq`. */
export function feed(url: string | URL, options: FeedOptions = {}): Feed {
  return new Feed(url, options);
}

const WORLD: World = { now: () => performance.now(), chance: Math.random };

/** For one loop at a time. `close` ends the loop at once, and leaves nothing behind. */
export class Feed implements AsyncIterableIterator<FeedEvent> {
  readonly #follower: Follower;
  readonly #line: Line;
  readonly #request: Request;
  readonly #world: World;
  readonly #signal: AbortSignal | undefined;
  readonly #aborted = (): void => this.close();
  #status: Status = "connecting";
  #onStatus: ((status: Status) => void) | undefined;
  #inTurn = false;

  constructor(url: string | URL, options: FeedOptions) {
    this.#world = options.world ?? WORLD;
    this.#request = requestOf(url, options);
    this.#line = new Line(this.#request, this.#world.sleep);
    this.#follower = followerOf(options, this.#world);
    this.#signal = options.signal;
    if (this.#signal?.aborted) this.close();
    this.#signal?.addEventListener("abort", this.#aborted);
  }

  /** Behind the event that was handed over last; null before anything is known. */
  get cursor(): string | null {
    return this.#follower.cursor;
  }

  get status(): Status {
    return this.#status;
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async next(): Promise<IteratorResult<FeedEvent, undefined>> {
    if (this.#inTurn) throw new Error("this feed is in a loop already; make another with feed()");
    this.#inTurn = true;
    try {
      return await this.#next();
    } catch (error) {
      this.#abandon();
      throw error;
    } finally {
      this.#inTurn = false;
    }
  }

  async #next(): Promise<IteratorResult<FeedEvent, undefined>> {
    for (;;) {
      const step = this.#follower.next(this.#world.now());
      switch (step.step) {
        case "deliver":
          return { done: false, value: step.event };
        case "read":
          this.#told(await this.#line.read(step.withinMs));
          break;
        case "connect":
          await this.#connect(step);
          break;
        case "over":
          this.#finish(step.error === null ? "ended" : "failed");
          if (step.error !== null) throw step.error;
          return { done: true, value: undefined };
      }
    }
  }

  async #connect(step: Connect): Promise<void> {
    this.#line.hangUp();
    if (step.afterMs > 0) {
      this.#become("waiting");
      await this.#line.pause(step.afterMs);
      if (this.#follower.isOver) return;
    }
    this.#become("connecting");
    const got = await this.#line.connect(step);
    if (typeof got === "string") {
      this.#told(got);
      return;
    }
    this.#follower.opened(this.#world.now(), got);
    if (got.status === 200 && !this.#follower.isOver) this.#become("open");
  }

  #told(got: Uint8Array | Ending): void {
    if (got === "closed") this.#follower.closed(this.#world.now());
    else if (got === "time up") this.#follower.timedOut(this.#world.now());
    else this.#follower.received(got);
  }

  /** End the loop, wherever it is. */
  close(): void {
    this.#follower.stop();
    this.#finish("closed");
  }

  /** What `for await` calls when its loop is left. */
  async return(): Promise<IteratorResult<FeedEvent, undefined>> {
    this.close();
    return Promise.resolve({ done: true, value: undefined });
  }

  #finish(status: Status): void {
    this.#signal?.removeEventListener("abort", this.#aborted);
    this.#line.cut();
    if (["ended", "closed", "failed"].includes(this.#status)) return;
    this.#follower.stop(); // an error is thrown once
    this.#become(status);
  }

  /** Whoever hears of an error calls nothing more: nothing may be left open behind it. */
  #abandon(): void {
    try {
      this.#finish("failed");
    } catch {
      // A listener that throws, again: what it threw first is told.
    }
  }

  #become(status: Status): void {
    if (this.#status === status) return;
    this.#status = status;
    this.#onStatus?.(status);
  }

  /** Call these for what comes, from now on. An error without `onError` is an unhandled one. */
  listen(listener: Listener): this {
    this.#onStatus = listener.onStatus;
    listener.onStatus?.(this.#status);
    void this.#call(listener);
    return this;
  }

  async #call(listener: Listener): Promise<void> {
    try {
      for await (const event of this) {
        if (event.type === "update") listener.onUpdate?.(event);
        else listener.onReset?.(event);
      }
      if (this.#status === "ended") listener.onEnd?.();
    } catch (error) {
      if (listener.onError === undefined) throw error;
      listener.onError(error);
    }
  }

  /** Ask for the current state, beside the feed. */
  async state(): Promise<unknown> {
    const { fetch, url } = this.#request;
    const init = await asking(this.#request, (headers) => headers.set("Accept", "application/json"));
    const response = await fetch(url.href, init);
    if (response.ok) return await response.json();
    const { status, detail } = openingOf(response, await response.text());
    const message = `the server answered ${status}: ${detail || "nothing more"}`;
    throw new FeedError(message, status, detail);
  }
}

function requestOf(url: string | URL, options: FeedOptions): Request {
  const base = (globalThis as { location?: { href: string } }).location?.href;
  const { credentials, headers = {}, fetch: given } = options;
  return {
    url: new URL(url, base),
    headers,
    credentials,
    // Called as a function of nobody: browsers refuse a fetch that is called as a method.
    fetch: given ?? ((address, init) => globalThis.fetch(address, init)),
  };
}

function followerOf(options: FeedOptions, world: World): Follower {
  const { after = null, lastSeq = null } = options;
  if (after !== null && lastSeq !== null) {
    throw new TypeError("give either after or lastSeq: each says where to begin");
  }
  const position = parsed(after);
  if (after !== null && position === null) {
    throw new TypeError(`after: ${JSON.stringify(after)} is no cursor; it is what feed().cursor was`);
  }
  const { silenceMs = TERMS.silenceMs, graceMs = TERMS.graceMs, limit = TERMS.limit } = options;
  for (const [name, ms] of Object.entries({ silenceMs, graceMs })) {
    if (!(ms > 0)) throw new TypeError(`${name}: ${ms} must be milliseconds, more than 0`);
  }
  return new Follower({ ...TERMS, silenceMs, graceMs, limit }, world.chance, position, lastSeq);
}
