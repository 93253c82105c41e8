// node server.mjs REDIS PORT: Socket.IO as its documentation sets it up with Redis Streams, with
// the recovery of missed messages switched on. What is posted to it goes to one room.
import { createServer } from "node:http";
import { createAdapter } from "@socket.io/redis-streams-adapter";
import { createClient } from "redis";
import { Server } from "socket.io";

const [url, port] = process.argv.slice(2);
const client = createClient({ url });
await client.connect();

const http = createServer((request, response) => {
  const chunks = [];
  request.on("data", (chunk) => chunks.push(chunk));
  request.on("end", () => {
    if (request.method === "POST") {
      io.to("job").emit("progress", Buffer.concat(chunks).toString());
    }
    response.writeHead(204).end();
  });
});
const io = new Server(http, { adapter: createAdapter(client), connectionStateRecovery: {} });
io.on("connection", (socket) => socket.join("job"));
http.listen(Number(port), "127.0.0.1");
