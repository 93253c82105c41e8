/** Semel in the browser and in Node. */

export { type Button, button } from "./button.js";
export { Feed, feed, type FeedOptions, type Listener, type Status, type World } from "./feed.js";
export { FeedError, type FeedEvent, type Position, type Reset, type Update } from "./rules.js";
export { idempotentFetch, type Patience } from "./fetch.js";
export {
  type Action,
  type RoomListener,
  type RoomOptions,
  type RoomWorld,
  Table,
  room,
} from "./room.js";
export { type SocketClass, type Token } from "./room_line.js";
export { type Acting } from "./room_rules.js";
export {
  ActionError,
  type ActionResult,
  ActionTimeoutError,
  type Presence,
  RoomError,
  type RoomEvent,
  type RoomResult,
  type RoomState,
  type RoomStatus,
  type RoomTerms,
  type TurnedAway,
} from "./room_values.js";
