/**
 * The connection of a feed over `fetch`: one call at a time, and none that waits longer than told.
 *
 * A call that is over, however it ended, is aborted: its socket is closed, and no timer is left.
 */

import { type Connect, FeedError, type Opening } from "./rules.js";

/** How a call ended, if not with what was asked for. */
export type Ending = "closed" | "time up";

export type Fetch = (url: string, init: RequestInit) => Promise<Response>;

export interface Request {
  readonly url: URL;
  readonly headers: HeadersInit | (() => HeadersInit | Promise<HeadersInit>);
  readonly credentials: RequestCredentials | undefined;
  readonly fetch: Fetch;
}

/** What is read of an answer that says why there is no feed. */
const SAID = 64 * 1024;

// The longest that a timer knows; a larger number would be none at all.
const LONGEST_TIMER_MS = 2 ** 31 - 1;

export class Line {
  readonly #request: Request;
  readonly #sleep: ((ms: number) => Promise<void>) | undefined;
  #call = new AbortController();
  #reader: ReadableStreamDefaultReader<Uint8Array> | null = null;
  #wake: (() => void) | null = null;
  #isCut = false;

  /** `sleep` is for tests. */
  constructor(request: Request, sleep?: (ms: number) => Promise<void>) {
    this.#request = request;
    this.#sleep = sleep;
  }

  async connect(step: Connect): Promise<Opening | Ending> {
    const call = new AbortController();
    this.#call = call;
    if (this.#isCut) return "closed";
    return await limited(call, step.withinMs, async () => {
      const response = await this.#fetch(step, call.signal);
      if (call.signal.aborted) {
        void response.body?.cancel(); // by a fetch that does not listen to its signal
        return "closed";
      }
      this.#reader = response.body?.getReader() ?? null;
      const isFeed = response.status === 200 && mediaType(response) === "text/event-stream";
      return openingOf(response, isFeed ? "" : await this.#said());
    });
  }

  async #fetch(step: Connect, signal: AbortSignal): Promise<Response> {
    const url = new URL(this.#request.url);
    if (step.lastSeq !== null) {
      url.search += `${url.search === "" ? "?" : "&"}last_seq=${step.lastSeq}`;
    }
    const init = await asking(this.#request, (headers) => {
      headers.set("Accept", "text/event-stream");
      if (step.cursor !== null) headers.set("Last-Event-ID", step.cursor);
    });
    return await this.#request.fetch(url.href, { ...init, signal });
  }

  async #said(): Promise<string> {
    const decoder = new TextDecoder();
    let said = "";
    for (;;) {
      const { done, value } = (await this.#reader?.read()) ?? { done: true, value: undefined };
      if (done || said.length > SAID) return said;
      said += decoder.decode(value, { stream: true });
    }
  }

  async read(withinMs: number): Promise<Uint8Array | Ending> {
    const reader = this.#reader;
    if (reader === null) return "closed";
    return await limited(this.#call, withinMs, async () => {
      const { done, value } = await reader.read();
      return done ? ("closed" as const) : value;
    });
  }

  /** Sleep, unless the line is cut. */
  async pause(ms: number): Promise<void> {
    if (this.#sleep !== undefined) {
      await this.#sleep(ms);
    } else if (!this.#isCut) {
      await new Promise<void>((resolve) => {
        const timer = setTimeout(resolve, ms);
        this.#wake = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    }
  }

  hangUp(): void {
    const reader = this.#reader;
    this.#reader = null;
    // Aborting closes the socket; a body that is not from the network hears of it this way.
    void reader?.cancel().catch(() => undefined);
    this.#call.abort();
  }

  /** Wake whoever waits, now and from now on. */
  cut(): void {
    this.#isCut = true;
    this.hangUp();
    this.#wake?.();
  }
}

/**
 * The work, or how it ended. Any error but a `FeedError` is taken for the network's: `fetch` does not
 * tell which it was. Whoever is aborted is not waited for, whether they listen to that or not.
 */
async function limited<T>(
  call: AbortController,
  withinMs: number,
  work: () => Promise<T>,
): Promise<T | Ending> {
  let isUp = false;
  const ending = (): Ending => (isUp ? "time up" : "closed");
  const failed = (error: unknown): Ending => {
    if (error instanceof FeedError) throw error;
    return ending();
  };
  let aborted = (): void => undefined;
  const ended = new Promise<Ending>((resolve) => {
    aborted = () => resolve(ending());
  });
  call.signal.addEventListener("abort", aborted);
  const timer = setTimeout(
    () => {
      isUp = true;
      call.abort();
    },
    Math.min(withinMs, LONGEST_TIMER_MS),
  );
  try {
    return await Promise.race([work().catch(failed), ended]);
  } finally {
    clearTimeout(timer);
    call.signal.removeEventListener("abort", aborted);
  }
}

// --- requests and answers -----------------------------------------------------------------------

/**
 * What `fetch` is asked with. What it would refuse without asking anybody is a `FeedError`: the next
 * time it would be refused again, and `fetch` does not tell that from a network that failed.
 */
export async function asking(
  request: Request,
  add: (headers: Headers) => void,
): Promise<RequestInit> {
  const { credentials, headers: given, url } = request;
  if (!["http:", "https:"].includes(url.protocol)) {
    throw new FeedError(`${url.protocol} is no address of a feed; it begins with http: or https:`);
  }
  if (url.username !== "" || url.password !== "") {
    throw new FeedError("fetch takes no credentials in an address: give them in headers");
  }
  const headers = await headersOf(given);
  add(headers);
  const init: RequestInit = {
    headers,
    cache: "no-store",
    ...(credentials === undefined ? {} : { credentials }),
  };
  try {
    new globalThis.Request(url.href, init);
  } catch (error) {
    throw hopeless("the request cannot be made", error);
  }
  return init;
}

async function headersOf(given: Request["headers"]): Promise<Headers> {
  try {
    return new Headers(typeof given === "function" ? await given() : given);
  } catch (error) {
    throw hopeless("the headers cannot be had", error);
  }
}

function hopeless(message: string, cause: unknown): FeedError {
  const said = cause instanceof Error ? cause.message : String(cause);
  return Object.assign(new FeedError(`${message}: ${said}`), { cause });
}

export function openingOf(response: Response, body: string): Opening {
  return {
    status: response.status,
    mediaType: mediaType(response),
    retryAfterMs: retryAfterMs(response.headers),
    detail: detailOf(response, body),
  };
}

function mediaType(response: Response): string {
  const [kind = ""] = (response.headers.get("Content-Type") ?? "").split(";");
  return kind.trim().toLowerCase();
}

/** What a problem document says in words; other bodies are pages for people to look at. */
function detailOf(response: Response, body: string): string {
  if (!/^application\/(.*\+)?json$/.test(mediaType(response))) return "";
  try {
    const document: unknown = JSON.parse(body);
    if (typeof document !== "object" || document === null) return "";
    const { detail, title } = document as Record<string, unknown>;
    const said = detail || title;
    return typeof said === "string" ? said : "";
  } catch {
    return "";
  }
}

/** Seconds, or a date, which is compared with the server's own clock where it tells it. */
export function retryAfterMs(headers: Headers): number | null {
  const text = headers.get("Retry-After");
  if (text === null) return null;
  if (/^[0-9]+(\.[0-9]+)?$/.test(text)) return Number(text) * 1000;
  const due = Date.parse(text);
  if (Number.isNaN(due)) return null;
  const told = Date.parse(headers.get("Date") ?? "");
  return Math.max(0, due - (Number.isNaN(told) ? Date.now() : told));
}
