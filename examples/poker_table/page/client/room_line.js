/**
 * The connection of a room's client over `WebSocket`: it is opened, says what it hears, and ends once.
 * Whoever hangs up hears nothing more of it.
 */
import { RoomError } from "./room_values.js";
export class Line {
    #hears;
    #socket = null;
    #isOver = false;
    constructor(address, hears) {
        this.#hears = hears;
        void this.#open(address);
    }
    async #open({ url, token: given, WebSocket }) {
        await null; // whoever makes the line has it before it says anything
        if (this.#isOver)
            return;
        try {
            const token = typeof given === "function" ? await given() : given;
            if (this.#isOver)
                return;
            this.#socket = new WebSocket(url.href);
            this.#follow(this.#socket, token);
        }
        catch (error) {
            // A token that cannot be had, or an address that is refused without asking anybody.
            if (!this.#isOver)
                this.#hears.failed(this, hopeless("there is no connection", error));
        }
    }
    #follow(socket, token) {
        socket.onopen = () => this.#hears.opened(this, token);
        socket.onmessage = ({ data }) => this.#hears.received(this, data);
        let reason = "";
        socket.onclose = ({ code }) => this.#hears.closed(this, code, reason);
        socket.onerror = ({ message }) => {
            reason = typeof message === "string" ? message : ""; // its end follows
        };
    }
    say(text) {
        try {
            this.#socket?.send(text);
        }
        catch {
            // It is closing: its end follows.
        }
    }
    hangUp() {
        const socket = this.#socket;
        this.#isOver = true;
        this.#socket = null;
        if (socket === null)
            return;
        socket.onopen = socket.onmessage = socket.onclose = null;
        socket.close(1000);
    }
}
function hopeless(message, cause) {
    const said = cause instanceof Error ? cause.message : String(cause);
    return Object.assign(new RoomError(`${message}: ${said}`), { cause });
}
// --- settings -----------------------------------------------------------------------------------
const NO_WEBSOCKET = "there is no WebSocket here, as in Node before 22: npm install ws, then " +
    'import { WebSocket } from "ws"; and room(url, { tableId, WebSocket })';
const PROTOCOLS = new Map([
    ["http:", "ws:"],
    ["https:", "wss:"],
]);
export function addressOf(given, options) {
    const { location, WebSocket: own } = globalThis;
    const url = new URL(given, location?.href);
    url.protocol = PROTOCOLS.get(url.protocol) ?? url.protocol;
    if (!["ws:", "wss:"].includes(url.protocol)) {
        throw new TypeError(`${url.protocol} is no address of rooms; it begins with ws: or wss:`);
    }
    const WebSocket = options.WebSocket ?? own;
    if (WebSocket === undefined)
        throw new TypeError(NO_WEBSOCKET);
    return { url, token: options.token ?? null, WebSocket };
}
