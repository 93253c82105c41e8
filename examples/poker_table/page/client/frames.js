/**
 * `text/event-stream` as frames: bytes in, cut anywhere, frames out.
 *
 * Read as https://html.spec.whatwg.org/multipage/server-sent-events.html says: lines end in LF, CR
 * or CRLF, one byte order mark is skipped, and an event counts when its blank line has come. What
 * was cut before that never was: it is not handed out, and its id is not.
 *
 * The Python client has the same in feed_frames.py; clients/vectors holds both to it.
 */
/** An event is larger than somebody was ready to hold. */
export class TooLargeError extends Error {
}
const LF = 10;
const CR = 13;
const BOM = "\ufeff";
// Of a number of milliseconds: so many are for ever, and more would only take time to read.
const MOST_DIGITS = 15;
// Lines are decoded one by one, and only the first may begin with a mark that is to be skipped.
const UTF8 = new TextDecoder("utf-8", { ignoreBOM: true });
/** The frames of one connection. Holds at most `limit` bytes of an event that is not over. */
export class Frames {
    retryMs = null;
    #limit;
    #lines = [];
    #nextLine = 0;
    #tail = [];
    #tailSize = 0;
    #afterCR = false;
    #isFirst = true;
    #event = "";
    #id = null;
    #data = [];
    #size = 0;
    constructor(limit) {
        this.#limit = limit;
    }
    /** Has nothing come of a next event? */
    get isBetween() {
        const held = this.#nextLine < this.#lines.length || this.#tailSize > 0;
        return !held && this.#data.length === 0 && this.#event === "" && this.#id === null;
    }
    feed(chunk) {
        let start = 0;
        for (let at = 0; at < chunk.length; at++) {
            const byte = chunk[at];
            const splitsCRLF = this.#afterCR && byte === LF;
            this.#afterCR = byte === CR;
            if (splitsCRLF) {
                start = at + 1;
            }
            else if (byte === LF || byte === CR) {
                this.#hold(chunk.subarray(start, at));
                this.#lines.push(joined(this.#tail, this.#tailSize));
                this.#tail = [];
                this.#tailSize = 0;
                start = at + 1;
            }
        }
        this.#hold(chunk.subarray(start));
    }
    #hold(piece) {
        if (piece.length > 0) {
            this.#tail.push(piece);
            this.#tailSize += piece.length;
        }
    }
    /** The next frame, null when more has to come; throws `TooLargeError` when it may not. */
    next() {
        for (let line = this.#line(); line !== undefined; line = this.#line()) {
            this.#check(line.length);
            let text = UTF8.decode(line);
            if (this.#isFirst) {
                this.#isFirst = false;
                if (text.startsWith(BOM))
                    text = text.slice(1);
            }
            if (text !== "") {
                this.#take(text, line.length);
            }
            else {
                const frame = this.#dispatched();
                if (frame !== null)
                    return frame;
            }
        }
        this.#check(this.#tailSize);
        return null;
    }
    #line() {
        if (this.#nextLine < this.#lines.length)
            return this.#lines[this.#nextLine++];
        this.#lines = [];
        this.#nextLine = 0;
        return undefined;
    }
    #check(more) {
        if (this.#size + more > this.#limit)
            throw new TooLargeError();
    }
    #take(line, size) {
        const colon = line.indexOf(":");
        const name = colon < 0 ? line : line.slice(0, colon);
        let text = colon < 0 ? "" : line.slice(colon + 1);
        if (text.startsWith(" "))
            text = text.slice(1);
        if (name === "event") {
            this.#event = text;
        }
        else if (name === "data") {
            this.#data.push(text);
            this.#size += size;
        }
        else if (name === "id" && !text.includes("\0")) {
            this.#id = text;
        }
        else if (name === "retry" && /^[0-9]+$/.test(text)) {
            this.retryMs = Number(text.replace(/^0+/, "").slice(0, MOST_DIGITS));
        }
        // Anything else is a comment, whose name is empty, or what somebody may mean some day.
    }
    #dispatched() {
        const data = this.#data.length > 0 ? this.#data.join("\n") : null;
        const frame = { event: this.#event || "message", data, id: this.#id };
        this.#event = "";
        this.#id = null;
        this.#data = [];
        this.#size = 0;
        return frame.data === null && frame.id === null ? null : frame;
    }
}
function joined(pieces, size) {
    const [only] = pieces;
    if (only !== undefined && pieces.length === 1)
        return only;
    const all = new Uint8Array(size);
    let at = 0;
    for (const piece of pieces) {
        all.set(piece, at);
        at += piece.length;
    }
    return all;
}
