/** What a server says, read with care: anything may be missing, or be something else. */

import { type Payload, type Presence } from "./room_values.js";
import { type Position, parsed } from "./rules.js";

// A server that asks to be asked at once does not mean a thousand times a second; and who is told to
// come back in a year looks again after ten minutes.
const SHORTEST_MS = 100;
const LONGEST_ASKED_MS = 600_000;

/** `requestId` is that of the question, if it is an answer, or has come of one. */
export interface Message {
  readonly kind: string;
  readonly requestId: string | null;
  readonly payload: Payload;
}

/** From one position to a later one, by this request of ours, if it was one. */
export interface RoomUpdate {
  readonly position: Position;
  readonly previous: Position;
  readonly patch: unknown;
  readonly events: readonly unknown[];
  readonly requestId: string | null;
}

/** Null for what is no message. */
export function messageOf(said: unknown): Message | null {
  let found: unknown = null;
  try {
    found = typeof said === "string" ? JSON.parse(said) : null;
  } catch {
    return null;
  }
  if (!isMapping(found)) return null;
  const { type, requestId, payload = {} } = found;
  if (typeof type !== "string" || !isMapping(payload)) return null;
  return { kind: type, requestId: typeof requestId === "string" ? requestId : null, payload };
}

/** As it goes over the line. */
export function spoken(message: Payload): string {
  return JSON.stringify(message);
}

export function isMapping(found: unknown): found is Payload {
  return typeof found === "object" && found !== null && !Array.isArray(found);
}

export function updateOf(payload: Payload, requestId: string | null): RoomUpdate | null {
  const position = positioned(payload, "stateVersion", "position");
  const previous = positioned(payload, "previousVersion", "previous");
  const { patch, events = [] } = payload;
  if (position === null || previous === null || previous.offset >= position.offset) return null;
  if (!Array.isArray(patch) || !Array.isArray(events)) return null;
  return { position, previous, patch, events, requestId };
}

export function presenceOf(payload: Payload): Presence | null {
  const { users } = payload;
  const spectators = whole(payload["spectators"] === undefined ? 0 : payload["spectators"]);
  if (!Array.isArray(users) || spectators === null) return null;
  return { users: users.filter((user) => typeof user === "string"), spectators };
}

/** The position that goes with a version; null unless there are both. */
export function positioned(payload: Payload, number: string, name: string): Position | null {
  const position = parsed(payload[name]);
  return position !== null && position.offset === whole(payload[number]) ? position : null;
}

/** A version; null for what is none, however much it looks like one. */
export function whole(found: unknown): number | null {
  // -0 is 0.
  return Number.isSafeInteger(found) && (found as number) >= 0 ? (found as number) + 0 : null;
}

export function text(found: unknown, otherwise = ""): string {
  return typeof found === "string" ? found : otherwise;
}

/** How long a server wants something to last, within reason. */
export function spanMs(ms: unknown): number | null {
  return typeof ms === "number" ? Math.min(Math.max(SHORTEST_MS, ms), LONGEST_ASKED_MS) : null;
}

/** The same for two actions that say the same. */
export function guardOf(action: unknown): string {
  return JSON.stringify(action, (_key, value: unknown) => {
    if (!isMapping(value)) return value;
    const names = Object.keys(value).sort();
    return Object.fromEntries(names.map((name) => [name, value[name]]));
  });
}
