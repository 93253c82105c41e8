/**
 * A patch, as a server sends it, made to a state: it fits, or nothing is changed.
 *
 * A patch is a list of operations. `[path, value]` sets what is at a path, `[path]` removes it. A path
 * is a list of keys and indexes; the empty one is the whole. A list grows at its end, by setting the
 * index that follows its last, and shrinks from there. The Python client (room_patches.py) does the
 * same.
 *
 * What is changed is copied once for the whole patch: a few thousand changes of one list would be as many
 * copies of it.
 *
 * The easy mistake is to assign to a key that somebody else has chosen: `__proto__` is one, too.
 */
// Nobody's state is deeper.
const DEEPEST = 200;
// What it names is not said: anything may be there, of any size.
const NOWHERE = "there is no such place";
/** The patch is none, or not for this state. */
export class PatchError extends Error {
    name = "PatchError";
}
/** The state with the changes made. What it was made from stays as it is. */
export function patched(state, patch) {
    const ours = new Set();
    let made = state;
    for (const operation of list(patch)) {
        const [path, ...value] = list(operation);
        if (value.length > 1 || list(path).length > DEEPEST) {
            throw new PatchError("no operation");
        }
        made = changed(made, list(path), value, ours);
    }
    return made;
}
function list(found) {
    if (!Array.isArray(found))
        throw new PatchError("no list");
    return found;
}
function changed(state, path, value, ours) {
    if (path.length === 0) {
        if (value.length === 0)
            throw new PatchError("the whole cannot be removed");
        return value[0];
    }
    const [key, ...rest] = path;
    if (Array.isArray(state)) {
        if (isIndex(key) && key <= state.length)
            return inList(state, key, rest, value, ours);
    }
    else if (typeof state === "object" && state !== null && typeof key === "string") {
        return inMapping(state, key, rest, value, ours);
    }
    throw new PatchError(NOWHERE);
}
function isIndex(key) {
    return Number.isSafeInteger(key) && key >= 0;
}
function inMapping(state, key, rest, value, ours) {
    const isSetting = rest.length === 0 && value.length > 0;
    if (!Object.hasOwn(state, key) && !isSetting) {
        throw new PatchError(NOWHERE);
    }
    const copy = ours.has(state) ? state : { ...state };
    ours.add(copy);
    if (rest.length === 0 && value.length === 0) {
        delete copy[key];
    }
    else {
        const made = rest.length > 0 ? changed(state[key], rest, value, ours) : value[0];
        const own = { value: made, enumerable: true, configurable: true, writable: true };
        Object.defineProperty(copy, key, own);
    }
    return copy;
}
function inList(state, index, rest, value, ours) {
    const isSetting = rest.length === 0 && value.length > 0;
    if (index === state.length && !isSetting)
        throw new PatchError(NOWHERE);
    const copy = ours.has(state) ? state : [...state];
    ours.add(copy);
    if (rest.length === 0 && value.length === 0)
        copy.splice(index, 1);
    else
        copy[index] = rest.length > 0 ? changed(state[index], rest, value, ours) : value[0];
    return copy;
}
