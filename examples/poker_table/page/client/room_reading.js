/** What a server says, read with care: anything may be missing, or be something else. */
import {} from "./room_values.js";
import { parsed } from "./rules.js";
// A server that asks to be asked at once does not mean a thousand times a second; and who is told to
// come back in a year looks again after ten minutes.
const SHORTEST_MS = 100;
const LONGEST_ASKED_MS = 600_000;
/** Null for what is no message. */
export function messageOf(said) {
    let found = null;
    try {
        found = typeof said === "string" ? JSON.parse(said) : null;
    }
    catch {
        return null;
    }
    if (!isMapping(found))
        return null;
    const { type, requestId, payload = {} } = found;
    if (typeof type !== "string" || !isMapping(payload))
        return null;
    return { kind: type, requestId: typeof requestId === "string" ? requestId : null, payload };
}
/** As it goes over the line. */
export function spoken(message) {
    return JSON.stringify(message);
}
export function isMapping(found) {
    return typeof found === "object" && found !== null && !Array.isArray(found);
}
export function updateOf(payload, requestId) {
    const position = positioned(payload, "stateVersion", "position");
    const previous = positioned(payload, "previousVersion", "previous");
    const { patch, events = [] } = payload;
    if (position === null || previous === null || previous.offset >= position.offset)
        return null;
    if (!Array.isArray(patch) || !Array.isArray(events))
        return null;
    return { position, previous, patch, events, requestId };
}
export function presenceOf(payload) {
    const { users } = payload;
    const spectators = whole(payload["spectators"] === undefined ? 0 : payload["spectators"]);
    if (!Array.isArray(users) || spectators === null)
        return null;
    return { users: users.filter((user) => typeof user === "string"), spectators };
}
/** The position that goes with a version; null unless there are both. */
export function positioned(payload, number, name) {
    const position = parsed(payload[name]);
    return position !== null && position.offset === whole(payload[number]) ? position : null;
}
/** A version; null for what is none, however much it looks like one. */
export function whole(found) {
    // -0 is 0.
    return Number.isSafeInteger(found) && found >= 0 ? found + 0 : null;
}
export function text(found, otherwise = "") {
    return typeof found === "string" ? found : otherwise;
}
/** How long a server wants something to last, within reason. */
export function spanMs(ms) {
    return typeof ms === "number" ? Math.min(Math.max(SHORTEST_MS, ms), LONGEST_ASKED_MS) : null;
}
/** The same for two actions that say the same. */
export function guardOf(action) {
    return JSON.stringify(action, (_key, value) => {
        if (!isMapping(value))
            return value;
        const names = Object.keys(value).sort();
        return Object.fromEntries(names.map((name) => [name, value[name]]));
    });
}
