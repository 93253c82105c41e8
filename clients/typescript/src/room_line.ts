/**
 * The connection of a room's client over `WebSocket`: it is opened, says what it hears, and ends once.
 * Whoever hangs up hears nothing more of it.
 */

import { RoomError } from "./room_values.js";

/** What is needed of a `WebSocket`. */
export interface Socket {
  onopen: ((event: never) => void) | null;
  onmessage: ((event: never) => void) | null;
  onclose: ((event: never) => void) | null;
  onerror: ((event: never) => void) | null;
  send(text: string): void;
  close(code?: number): void;
}

export type SocketClass = new (url: string) => Socket;

/** Who one is; a function is asked at every connection, so that it can be renewed. */
export type Token = string | null | (() => string | null | Promise<string | null>);

export interface Address {
  readonly url: URL;
  readonly token: Token;
  readonly WebSocket: SocketClass;
}

/** Who is told what happens on a line. */
export interface Hears {
  opened(line: Line, token: string | null): void;
  received(line: Line, said: unknown): void;
  /** `reason`, as far as it is known: browsers do not tell why there is no connection. */
  closed(line: Line, code: number | null, reason: string): void;
  /** What is wrong will be wrong again. */
  failed(line: Line, error: RoomError): void;
}

export class Line {
  readonly #hears: Hears;
  #socket: Socket | null = null;
  #isOver = false;

  constructor(address: Address, hears: Hears) {
    this.#hears = hears;
    void this.#open(address);
  }

  async #open({ url, token: given, WebSocket }: Address): Promise<void> {
    await null; // whoever makes the line has it before it says anything
    if (this.#isOver) return;
    try {
      const token = typeof given === "function" ? await given() : given;
      if (this.#isOver) return;
      this.#socket = new WebSocket(url.href);
      this.#follow(this.#socket, token);
    } catch (error) {
      // A token that cannot be had, or an address that is refused without asking anybody.
      if (!this.#isOver) this.#hears.failed(this, hopeless("there is no connection", error));
    }
  }

  #follow(socket: Socket, token: string | null): void {
    socket.onopen = () => this.#hears.opened(this, token);
    socket.onmessage = ({ data }: { data: unknown }) => this.#hears.received(this, data);
    let reason = "";
    socket.onclose = ({ code }: { code: number }) => this.#hears.closed(this, code, reason);
    socket.onerror = ({ message }: { message?: unknown }) => {
      reason = typeof message === "string" ? message : ""; // its end follows
    };
  }

  say(text: string): void {
    try {
      this.#socket?.send(text);
    } catch {
      // It is closing: its end follows.
    }
  }

  hangUp(): void {
    const socket = this.#socket;
    this.#isOver = true;
    this.#socket = null;
    if (socket === null) return;
    socket.onopen = socket.onmessage = socket.onclose = null;
    socket.close(1000);
  }
}

function hopeless(message: string, cause: unknown): RoomError {
  const said = cause instanceof Error ? cause.message : String(cause);
  return Object.assign(new RoomError(`${message}: ${said}`), { cause });
}

// --- settings -----------------------------------------------------------------------------------

const NO_WEBSOCKET =
  "there is no WebSocket here, as in Node before 22: npm install ws, then " +
  'import { WebSocket } from "ws"; and room(url, { tableId, WebSocket })';

const PROTOCOLS: ReadonlyMap<string, string> = new Map([
  ["http:", "ws:"],
  ["https:", "wss:"],
]);

export function addressOf(
  given: string | URL,
  options: { readonly token?: Token; readonly WebSocket?: SocketClass },
): Address {
  const { location, WebSocket: own } = globalThis as Partial<typeof globalThis>;
  const url = new URL(given, location?.href);
  url.protocol = PROTOCOLS.get(url.protocol) ?? url.protocol;
  if (!["ws:", "wss:"].includes(url.protocol)) {
    throw new TypeError(`${url.protocol} is no address of rooms; it begins with ws: or wss:`);
  }
  const WebSocket = options.WebSocket ?? (own as SocketClass | undefined);
  if (WebSocket === undefined) throw new TypeError(NO_WEBSOCKET);
  return { url, token: options.token ?? null, WebSocket };
}
