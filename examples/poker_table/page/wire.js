// A WebSocket that also hears what the table's client has no use for: the server's name and time.

export class Wire extends WebSocket {
  static current = null;
  static server = null;
  static aheadMs = 0; // of our clock
  static onServer = () => {};

  constructor(url, protocols) {
    super(url, protocols);
    Wire.current = this;
    this.addEventListener("message", ({ data }) => Wire.#hear(JSON.parse(data)));
  }

  static #hear({ type, payload }) {
    if (type === "SERVER") {
      Wire.server = payload.name;
      Wire.onServer();
    }
    if (payload?.serverTime) Wire.aheadMs = payload.serverTime - Date.now();
  }

  /** What time it is, by the server. */
  static now() {
    return Date.now() + Wire.aheadMs;
  }

  /** The server on the other end dies, as if its machine was gone. */
  static kill() {
    Wire.current?.send('{"type":"KILL"}');
  }
}
