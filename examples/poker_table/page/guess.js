// What the server will make of a click, most likely. It is shown until the server has said so.

/** The table with an action of this user's done. What it was made from stays as it is. */
export function guess(table, action, user) {
  const change = GUESSES[action.actionType];
  const number = table.seats.findIndex((seat) => seat?.user === user);
  if (!change || (number < 0 && action.actionType !== "sit")) return table;
  return change(table, action, number, user);
}

const GUESSES = {
  sit: (table, { seat, buyIn }, _, user) =>
    table.seats[seat] === null
      ? withSeat(table, seat, { ...NEW, user, stack: buyIn })
      : table,
  fold: (table, _, number) => turned(withSeat(table, number, { isIn: false, cards: [] })),
  check: (table) => turned(table),
  call: (table, _, number) => turned(paid(table, number, table.can?.call ?? 0)),
  bet: (table, { amount }, number) => turned(paid(table, number, amount - table.seats[number].bet)),
  raise: (table, action, number) => GUESSES.bet(table, action, number),
  away: (table, _, number) => withSeat(table, number, { away: true }),
  back: (table, _, number) => withSeat(table, number, { away: false, leaving: false }),
};

const NEW = { stack: 0, away: false, leaving: false, bet: 0, cards: [], isIn: false };

/** It is somebody else's turn, and we do not know whose. */
function turned(table) {
  return { ...table, actor: null, can: null };
}

function paid(table, number, chips) {
  const { stack, bet } = table.seats[number];
  return withSeat(table, number, { stack: stack - chips, bet: bet + chips });
}

function withSeat(table, number, changes) {
  const seats = [...table.seats];
  seats[number] = { ...seats[number], ...changes };
  return { ...table, seats };
}
