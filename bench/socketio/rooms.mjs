// node rooms.mjs PORT: Socket.IO with acknowledgements, as its documentation shows them. A number
// for each room is kept in memory; what is added is told to the room, and then acknowledged.
import { createServer } from "node:http";
import { Server } from "socket.io";

const [port] = process.argv.slice(2);
const http = createServer();
const io = new Server(http);
const rooms = new Map();

io.on("connection", (socket) => {
  socket.on("join", (room, done) => {
    socket.join(room);
    if (!rooms.has(room)) rooms.set(room, { room, count: 0, note: "", by: {} });
    done(rooms.get(room));
  });
  socket.on("add", ({ room, user, note }, done) => {
    const state = rooms.get(room);
    state.count += 1;
    state.note = note;
    state.by[user] = (state.by[user] ?? 0) + 1;
    io.to(room).emit("update", { room, count: state.count, note, by: { [user]: state.by[user] } });
    done({ count: state.count, note });
  });
});
http.listen(Number(port), "127.0.0.1");
