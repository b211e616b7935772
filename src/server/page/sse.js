// Server-sent events, https://html.spec.whatwg.org/multipage/server-sent-events.html. EventSource cannot send a POST.

/** Splits a stream of text into the data of its events. */
export class EventParser {
  #line = "";
  #data = [];

  /** Takes the next piece of the stream. Returns the data of each event that this piece completes. */
  push(text) {
    const events = [];
    const lines = text.split("\n");
    lines[0] = this.#line + lines[0];
    this.#line = lines.pop();
    for (const line of lines) {
      this.#take(line.endsWith("\r") ? line.slice(0, -1) : line, events);
    }
    return events;
  }

  #take(line, events) {
    if (line === "" && this.#data.length > 0) {
      events.push(this.#data.join("\n"));
      this.#data = [];
    } else if (line.startsWith("data:")) {
      this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    }
    // Anything else is a comment, such as a ping, or a field that this API does not use.
  }
}
