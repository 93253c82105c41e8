/**
 * `fetch` with a key per logical request, and tries that are safe.
 *
 *     const send = idempotentFetch();
 *     await send("/orders", { method: "POST", body: JSON.stringify(order) });
 *
 * A server can only tell a repeat from a second request by its `Idempotency-Key`. So the key is made
 * above the loop that tries again, and nothing without one is sent twice unless its method allows
 * that. The Python clients (semel.client) decide in the same way.
 *
 * The easy mistake is a retry around this: a second call is a second request, with a key of its own.
 */

import { retryAfterMs } from "./line.js";

export interface PatientWorld {
  now(): number;
  /** From 0 to 1. */
  chance(): number;
  /** Until then, or until it is aborted. */
  sleep(ms: number, signal: AbortSignal): Promise<void>;
}

export interface Patience {
  /** At most so many tries, the first one included. */
  readonly tries?: number;
  /** None begins later than this after the first. */
  readonly withinMs?: number;
  /** The pause is what `Retry-After` says, or a random part of this, doubled with every try. */
  readonly backoffMs?: number;
  readonly longestMs?: number;
  /** The methods that get a key; one that the caller has set is kept. */
  readonly methods?: readonly string[];
  readonly fetch?: typeof fetch;
  /** Time and chance, for tests. */
  readonly world?: PatientWorld;
}

const KEY = "Idempotency-Key";
const SAFE: ReadonlySet<string> = new Set(["GET", "HEAD", "OPTIONS", "TRACE"]);
const IDEMPOTENT: ReadonlySet<string> = new Set([...SAFE, "PUT", "DELETE"]); // RFC 9110, 9.2.2

// What says "not now". 500 is not among them: who answers it may have recorded it.
const PASSING: ReadonlySet<number> = new Set([408, 425, 429, 502, 503, 504]);

const PROBLEM = "urn:semel:problem:";

// Answers up to this size are had whole before they are handed on: behind that, it is too late to
// try again.
const HELD = 1024 * 1024;

const WORLD: PatientWorld = {
  now: () => performance.now(),
  chance: Math.random,
  sleep: (ms, signal) =>
    new Promise((resolve) => {
      const done = (): void => {
        clearTimeout(timer);
        signal.removeEventListener("abort", done);
        resolve();
      };
      const timer = setTimeout(done, ms);
      signal.addEventListener("abort", done);
    }),
};

/** A `fetch` that sends as often as it takes. */
export function idempotentFetch(patience: Patience = {}): typeof fetch {
  const { tries = 5, withinMs = 60_000, backoffMs = 500, longestMs = 30_000 } = patience;
  const { methods = ["POST", "PATCH"], world = WORLD } = patience;
  const send = patience.fetch ?? ((input, init) => globalThis.fetch(input, init));

  return async (input, init) => {
    const request = new Request(input, init);
    const isKeyed = await giveKey(request, methods);
    const isRepeatable = (isKeyed || IDEMPOTENT.has(request.method)) && !isStream(init?.body);
    const startedAt = world.now();
    for (let tried = 1; ; ) {
      const answer = await once(isRepeatable ? request.clone() : request, send, isRepeatable);
      const askedMs = answer instanceof Response ? retryAfterMs(answer.headers) : null;
      const isRunning = answer instanceof Response && (await saysRunning(answer, askedMs));
      const isPassing = answer instanceof Response ? isRunning || PASSING.has(answer.status) : true;
      // Full jitter: clients that failed together do not come back together.
      const doubled = world.chance() * Math.min(backoffMs * 2 ** (tried - 1), longestMs);
      const pauseMs = askedMs ? Math.min(askedMs, longestMs) : doubled;
      const isLast = tried >= tries && !(tries > 1 && isRunning);
      const isLate = world.now() - startedAt + pauseMs > withinMs;
      if (!isRepeatable || !isPassing || isLast || isLate || request.signal.aborted) {
        if (answer instanceof Response) return answer;
        throw answer.error;
      }
      if (answer instanceof Response) await answer.body?.cancel();
      // Told when to come back, it was no failed try.
      if (!(isRunning && askedMs !== null)) tried += 1;
      await world.sleep(pauseMs, request.signal);
    }
  };
}

/** See to the key, and say whether there is one. */
async function giveKey(request: Request, methods: readonly string[]): Promise<boolean> {
  const { headers, method } = request;
  if (SAFE.has(method)) return false;
  if (!headers.get(KEY)?.trim()) {
    headers.delete(KEY);
    if (methods.includes(method)) headers.set(KEY, `"${await newKey()}"`);
  }
  return headers.has(KEY);
}

/** Not `randomUUID`, which is kept from pages that did not come over TLS. */
async function newKey(): Promise<string> {
  const bytes = (await randomness()).getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// A name that no bundler follows: only Node 18 has to be asked for what others have at hand.
const IN_NODE: string = "node:crypto";

async function randomness(): Promise<Crypto> {
  if (typeof crypto !== "undefined") return crypto;
  return ((await import(IN_NODE)) as { webcrypto: Crypto }).webcrypto;
}

function isStream(body: unknown): boolean {
  return body instanceof ReadableStream;
}

/** One try: the answer, whole where it is small, or the error instead of one. */
async function once(
  request: Request,
  send: typeof fetch,
  isRepeatable: boolean,
): Promise<Response | { readonly error: unknown }> {
  try {
    const response = await send(request);
    if (isRepeatable && isSmall(response)) await response.clone().arrayBuffer();
    return response;
  } catch (error) {
    return { error };
  }
}

function isSmall({ headers }: Response): boolean {
  const length = headers.get("Content-Length");
  if (length !== null) return Number(length) <= HELD;
  return /^application\/(.*\+)?json\b/i.test(headers.get("Content-Type") ?? "");
}

/** A conflict that ends by itself: the first request is still being worked on. */
async function saysRunning(response: Response, askedMs: number | null): Promise<boolean> {
  if (response.status !== 409) return false;
  const problem = await problemOf(response);
  if (problem?.startsWith(PROBLEM)) return problem === `${PROBLEM}in-progress`;
  return askedMs !== null;
}

async function problemOf(response: Response): Promise<string | null> {
  const kind = response.headers.get("Content-Type") ?? "";
  if (!/^application\/problem\+json\b/i.test(kind) || !isSmall(response)) return null;
  try {
    const document = (await response.clone().json()) as { type?: unknown } | null;
    return typeof document?.type === "string" ? document.type : null;
  } catch {
    return null;
  }
}
