// The HTTP API of the server. Addresses are relative, so that the page also works behind a proxy that adds a prefix.

import { EventParser } from "./sse.js";

/** A request that failed. The page shows the user `title`, which says what happened, and `message`, which says why. */
export class ApiError extends Error {
  constructor(title, message, status = 0) {
    super(message);
    this.title = title;
    this.status = status;
  }
}

const TITLES = {
  400: "The server refused the request",
  401: "The server needs a key",
  404: "The server does not know this model or address",
  413: "The message is too large for the server",
  429: "The server is busy",
  503: "The server is not ready",
};

const INVALID = "The server sent an invalid answer";

/** Sends requests to the server, with the API key if there is one. */
export class Api {
  #loadKey;
  #askForKey;

  /** `loadKey` returns the key or null. `askForKey` takes the refused key and resolves to whether there is a new one. */
  constructor(loadKey, askForKey) {
    this.#loadKey = loadKey;
    this.#askForKey = askForKey;
  }

  /** Returns the models that the server runs: `[{ id, max_model_len }]`. */
  async models() {
    const response = await this.#fetch("v1/models", { canAsk: true });
    const { data } = parseJson(await response.text());
    if (!Array.isArray(data)) throw new ApiError(INVALID, "The list of models is missing.");
    return data;
  }

  /** Returns the metrics in Prometheus's text format. Never asks for the key. */
  async metrics() {
    const response = await this.#fetch("metrics", {});
    return response.text();
  }

  /** Sends a chat completion request and yields the chunks of the answer's stream. `signal` cancels the request. */
  async *chat(request, signal) {
    const response = await this.#fetch("v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(request),
      signal,
      canAsk: true,
    });
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const chunk = parseJson(data);
      if (chunk.error) throw new ApiError("The server stopped the answer", sentence(String(chunk.error.message)));
      yield chunk;
    }
    throw new ApiError("The connection was lost", "The answer is incomplete.");
  }

  async #fetch(address, { canAsk = false, headers = {}, ...options }) {
    for (;;) {
      const key = this.#loadKey();
      const authorization = key ? { authorization: `Bearer ${key}` } : {};
      const response = await reach(address, { ...options, cache: "no-store", headers: { ...headers, ...authorization } });
      if (response.ok) return response;
      if (response.status !== 401 || !canAsk || !(await this.#askForKey(key))) throw await errorOf(response);
    }
  }
}

async function reach(address, options) {
  try {
    return await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("Cannot reach the server", "Check that inferno still runs and that the network works.");
  }
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError(INVALID, "It is not JSON. Is there a proxy between this page and inferno?");
  }
}

async function errorOf(response) {
  const body = await response.json().catch(() => null);
  const message = typeof body?.error?.message === "string" ? body.error.message : `HTTP status ${response.status}`;
  const wait = Number.parseFloat(response.headers.get("retry-after"));
  const advice = wait > 0 ? ` Try again in ${Math.ceil(wait)} s.` : "";
  const title = TITLES[response.status] ?? "The server reported an error";
  return new ApiError(title, sentence(message) + advice, response.status);
}

/** Turns an error message of the server, which starts in lower case and has no full stop, into a sentence. */
function sentence(message) {
  const text = message.charAt(0).toUpperCase() + message.slice(1);
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

/** Yields the data of each event in the body of a response. */
async function* events(response) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost", "The answer is incomplete.");
  } finally {
    reader.cancel().catch(() => {}); // closes the connection, which cancels the request on the server
  }
}
