/** Semel in the browser and in Node. */

export { Feed, feed, type FeedOptions, type Listener, type Status, type World } from "./feed.js";
export { FeedError, type FeedEvent, type Position, type Reset, type Update } from "./rules.js";
export { idempotentFetch, type Patience } from "./fetch.js";
