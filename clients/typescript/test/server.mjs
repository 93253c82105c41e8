/**
 * A server of feeds that does what it is told, to the byte: it speaks HTTP by hand.
 *
 * Each connection plays the next part; the last part is played for all that follow.
 */

import { once } from "node:events";
import net from "node:net";

const HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n";
export const PLAIN = Buffer.from(`${HEAD}Connection: close\r\n\r\n`);
export const CHUNKED = Buffer.from(`${HEAD}Transfer-Encoding: chunked\r\n\r\n`);

export async function serve(...parts) {
  const server = new Server(parts);
  server.listener.listen(0, "127.0.0.1");
  await once(server.listener, "listening");
  server.url = `http://127.0.0.1:${server.listener.address().port}/feeds/job-1`;
  return server;
}

class Server {
  asked = [];
  sockets = new Set();
  /** Of these, those on which something was asked: Node keeps a spare one open for a while. */
  calls = new Set();

  constructor(parts) {
    this.parts = parts;
    this.listener = net.createServer((socket) => this.#play(socket));
  }

  #play(socket) {
    this.sockets.add(socket);
    socket.setNoDelay(true);
    socket.on("error", () => undefined);
    socket.on("close", () => {
      this.sockets.delete(socket);
      this.calls.delete(socket);
    });
    let head = "";
    socket.on("data", (chunk) => {
      if (head.endsWith("\r\n\r\n")) return;
      head += chunk.toString("latin1");
      if (!head.endsWith("\r\n\r\n")) return;
      const asked = parse(head);
      this.asked.push(asked);
      this.calls.add(socket);
      const part = this.parts.length > 1 ? this.parts.shift() : this.parts[0];
      void part(socket, asked);
    });
  }

  get cursors() {
    return this.asked.map(({ headers }) => headers.get("last-event-id"));
  }

  /** Wait until every client has hung up. */
  async empty() {
    for (const socket of this.calls) {
      await new Promise((resolve) => socket.once("close", resolve));
    }
  }

  async close() {
    for (const socket of this.sockets) socket.destroy();
    this.listener.close();
    await once(this.listener, "close");
  }
}

function parse(head) {
  const [first, ...lines] = head.trimEnd().split("\r\n");
  const headers = new Headers();
  for (const line of lines) {
    const colon = line.indexOf(":");
    headers.append(line.slice(0, colon), line.slice(colon + 1).trim());
  }
  return { target: first.split(" ")[1], headers };
}

// --- parts --------------------------------------------------------------------------------------

/** These bytes, then the end. */
export function sends(...pieces) {
  return (socket) => socket.end(Buffer.concat(pieces));
}

/** These bytes, then nothing, until the client hangs up. */
export function holds(...pieces) {
  return (socket) => socket.write(Buffer.concat(pieces));
}

/** These bytes, one at a time. */
export function dribbles(...pieces) {
  return async (socket) => {
    for (const byte of Buffer.concat(pieces)) {
      if (!socket.write(Buffer.of(byte))) await once(socket, "drain");
      await new Promise(setImmediate);
    }
    socket.end();
  };
}

/** An answer in one piece. */
export function answers(status, body = "", { type = "application/problem+json", ...headers } = {}) {
  const text = typeof body === "string" ? body : JSON.stringify(body);
  const lines = [`HTTP/1.1 ${status} -`, `Content-Type: ${type}`, "Connection: close"];
  for (const [name, value] of Object.entries(headers)) lines.push(`${name}: ${value}`);
  if (status !== 204) lines.push(`Content-Length: ${Buffer.byteLength(text)}`);
  return sends(Buffer.from(`${lines.join("\r\n")}\r\n\r\n${text}`));
}

/** What `answer` has for a cursor; the first connections are cut behind so many bytes. */
export function serves(answer, cuts, framing) {
  return (socket, asked) => {
    const body = answer(asked.headers.get("last-event-id"));
    const raw = Buffer.concat([framing, framing === CHUNKED ? chunked(body) : body]);
    socket.end(cuts.length > 0 ? raw.subarray(0, cuts.shift()) : raw);
  };
}

function chunked(body) {
  const pieces = [];
  for (let at = 0; at < body.length; at += 50) {
    const piece = body.subarray(at, at + 50);
    pieces.push(Buffer.from(`${piece.length.toString(16)}\r\n`), piece, Buffer.from("\r\n"));
  }
  return Buffer.concat([...pieces, Buffer.from("0\r\n\r\n")]);
}
