/** A button for one action: it cannot be pressed twice for the same turn. */
import {} from "./room.js";
import {} from "./room_values.js";
/**
 * Enabled by how the table stands, and never by a reply alone: while `enabledWhen` says so of the
 * confirmed state, nothing of ours is on its way, and that state is as new as the last answer.
 */
export function button(table, { enabledWhen }) {
    const isEnabled = () => table.isSettled && enabledWhen(table.confirmed);
    return {
        get isEnabled() {
            return isEnabled();
        },
        // Without `this`: it may be handed on alone.
        press: (action) => (isEnabled() ? table.act(action) : null),
    };
}
