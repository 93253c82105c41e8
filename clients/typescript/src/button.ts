/** A button for one action: it cannot be pressed twice for the same turn. */

import { type Action, type Table } from "./room.js";
import { type ActionResult } from "./room_values.js";

export interface Button {
  readonly isEnabled: boolean;
  /** Act, if it is enabled; else null, and nothing is sent. */
  press(action: Action): Promise<ActionResult> | null;
}

/**
 * Enabled by how the table stands, and never by a reply alone: while `enabledWhen` says so of the
 * confirmed state, nothing of ours is on its way, and that state is as new as the last answer.
 */
export function button<S>(
  table: Table<S>,
  { enabledWhen }: { readonly enabledWhen: (confirmed: S) => boolean },
): Button {
  const isEnabled = (): boolean => table.isSettled && enabledWhen(table.confirmed as S);
  return {
    get isEnabled() {
      return isEnabled();
    },
    // Without `this`: it may be handed on alone.
    press: (action) => (isEnabled() ? table.act(action) : null),
  };
}
