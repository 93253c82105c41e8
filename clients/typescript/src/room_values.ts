/** What a room's client hands over, what it does, and what goes wrong, as values. */

// --- what goes wrong ----------------------------------------------------------------------------

/** The table cannot be had, or not any more. `code` is the server's word for it, or ours. */
export class RoomError extends Error {
  override readonly name = "RoomError";

  constructor(
    message: string,
    readonly code: string = "",
  ) {
    super(message);
  }
}

/**
 * An action was refused: nothing was changed by it. `code` says why. By the server; or, if `wasSent`
 * is false, before it was sent: the server would not take it.
 */
export class ActionError extends Error {
  override readonly name = "ActionError";

  constructor(
    readonly code: string,
    /** What the server said besides. */
    readonly detail: string,
    readonly requestId: string,
    readonly wasSent = true,
  ) {
    super(detail === "" ? code : `${code}: ${detail}`);
  }
}

/**
 * No answer came in time. Unless `wasSent` is false, nobody knows what became of the action; it is
 * false only of what was never sent under this id, as far as this client can know; then the message
 * says why, if anybody knows. To ask again, and not to do it twice:
 * `act(action, { requestId: error.requestId })`.
 */
export class ActionTimeoutError extends Error {
  override readonly name = "TimeoutError";

  constructor(
    readonly requestId: string,
    timeoutMs: number,
    readonly wasSent: boolean,
    why = "",
  ) {
    const unknown = `the outcome is unknown; ask again with { requestId: "${requestId}" }`;
    const unsent = `it was never sent: nothing was changed by it${why === "" ? "" : `; ${why}`}`;
    super(`no answer in ${timeoutMs} ms: ${wasSent ? unknown : unsent}`);
  }
}

// --- what is handed over ------------------------------------------------------------------------

/** Getting in; in; between two connections; closed by us; given up. */
export type RoomStatus = "connecting" | "open" | "waiting" | "closed" | "failed";

/** How the table looks now. It is not yours to change. */
export interface RoomState<S = unknown> {
  /** The confirmed state, with the actions of this client made already that are not in it. */
  readonly state: S;
  /** What the server says, at this version. */
  readonly confirmed: S;
  readonly version: number;
  /** Whose view it is; null is everybody's. */
  readonly viewer: string | null;
  /** How many actions of this client the confirmed state does not show yet. */
  readonly pending: number;
}

/** Something that happened, with the change that made this version. */
export interface RoomEvent {
  readonly version: number;
  readonly data: unknown;
}

/** What came of a hand that is finished. */
export interface RoomResult {
  readonly version: number;
  readonly result: unknown;
}

/** Who is there now. */
export interface Presence {
  readonly users: readonly string[];
  readonly spectators: number;
}

/** The server does not let us in, and says why; whether for good, the status says. */
export interface TurnedAway {
  readonly code: string;
  readonly message: string;
}

export type News =
  | { readonly type: "state"; readonly state: RoomState }
  | { readonly type: "event"; readonly event: RoomEvent }
  | { readonly type: "result"; readonly result: RoomResult }
  | { readonly type: "presence"; readonly presence: Presence }
  | {
      readonly type: "became";
      readonly status: RoomStatus;
      /** If the server did not let us in last time. */
      readonly turnedAway: TurnedAway | null;
    }
  /** An error of the server's that belongs to nothing that was asked for. */
  | { readonly type: "trouble"; readonly code: string; readonly message: string };

/** The server has done it, and this is its reply. `cached`: it had done so before. */
export interface ActionResult {
  readonly requestId: string;
  readonly reply: unknown;
  readonly version: number;
  readonly cached: boolean;
  readonly action: unknown;
}

// --- what to do ---------------------------------------------------------------------------------

/**
 * Why somebody hangs up: the connection has ended, or could not be made; it fell silent; its server
 * ends, or has too much to do; it was told when to come back; for another token; it was shown out.
 */
export type HangUpWhy =
  | "ended"
  | "silence"
  | "drained"
  | "overloaded"
  | "told"
  | "unauthorized"
  | "left";

/** Why a snapshot is asked for. */
export type Reason = "gap" | "reconnect" | "manual" | "stale";

export type RoomStep =
  /** Make a connection, and give up if there is none in time. */
  | { readonly step: "open"; readonly withinMs: number }
  /** End the connection, whatever it is at. There will be another in so long. */
  | { readonly step: "hang up"; readonly afterMs: number; readonly why: HangUpWhy }
  /** Say this. */
  | { readonly step: "send"; readonly message: Payload }
  /** Hand this over. */
  | { readonly step: "deliver"; readonly news: News }
  /** A request is answered, or will not be. */
  | { readonly step: "settle"; readonly requestId: string; readonly answer: ActionResult | Error }
  /** Nothing to do for so long, unless something happens. */
  | { readonly step: "wait"; readonly withinMs: number }
  /** Hang up. There is nothing more, or an error to be told. */
  | { readonly step: "over"; readonly error: RoomError | null };

export type Emit = (step: RoomStep) => void;

/** A mapping of JSON, in which anything may be missing, or be something else. */
export type Payload = Readonly<Record<string, unknown>>;

// --- patience -----------------------------------------------------------------------------------

export interface RoomTerms {
  /** From an action to its answer. */
  readonly timeoutMs: number;
  /** From asking for a snapshot to having it; it grows with every one that does not come. */
  readonly resyncMs: number;
  /** So long after the server has said that there is more than we have, it should have come. */
  readonly graceMs: number;
  /** To connect, and then to get in. */
  readonly connectMs: number;
  /** Until the server says its own; two and a half without a word are silence. */
  readonly heartbeatMs: number;
  /** The pause before trying again; it doubles. */
  readonly backoffMs: number;
  readonly longestMs: number;
  /** Updates that are kept while the one before them is missing. */
  readonly buffered: number;
  /**
   * Actions that may wait for their answer; one more is refused, since they are sent one after the
   * other, and would be too late.
   */
  readonly pending: number;
}

export const ROOM_TERMS: RoomTerms = {
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
  readonly #terms: RoomTerms;
  readonly #chance: () => number;
  #failures = 0;

  constructor(terms: RoomTerms, chance: () => number) {
    this.#terms = terms;
    this.#chance = chance;
  }

  pauseMs(most = Infinity): number {
    this.#failures += 1;
    return this.sameMs(most);
  }

  /** After the same failure: another chance. */
  sameMs(most = Infinity): number {
    const base = this.#terms.backoffMs;
    const doubled = base * 2 ** Math.min(Math.max(0, this.#failures - 1), 30);
    const ceiling = Math.min(doubled, this.#terms.longestMs, Math.max(base, most));
    return base / 2 + this.#chance() * (ceiling - base / 2);
  }

  reset(): void {
    this.#failures = 0;
  }
}
