// A server with the API that the page uses. It plays answers instead of running a model.
//
//   node tests/page/mock_server.mjs [PORT]
//
// The first word of a message chooses the answer: a name in samples.mjs, `slow`, `cut`, `fault`, `busy` or `empty`.

import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { ANSWERS, REASONING } from "./samples.mjs";

const PAGE = fileURLToPath(new URL("../../src/server/page/", import.meta.url));
const TYPES = { ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8" };
const POLICY = [
  "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:", "connect-src 'self'",
  "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "require-trusted-types-for 'script'",
  "trusted-types 'none'", "report-uri /violations",
].join("; ");
const MODELS = [
  { id: "example/model-20b", object: "model", owned_by: "inferno", max_model_len: 131072 },
  { id: "example/model-8b", object: "model", owned_by: "inferno", max_model_len: 8192 },
];

/** Starts a mock server on 127.0.0.1. Tests read and change its fields. */
export class MockServer {
  /** The key that requests must carry, or null. */
  key = null;
  /** Milliseconds between two tokens. */
  delay = 2;
  /** The bodies of the completions that were asked for. */
  requests = [];
  /** Reports about the content-security policy. */
  violations = [];
  /** How many completions the client has canceled. */
  canceled = 0;

  #server = createServer((request, response) => this.#handle(request, response));
  #metrics = new MockMetrics();
  #busy = 0;

  async listen(port = 0) {
    await new Promise((resolve) => this.#server.listen(port, "127.0.0.1", resolve));
    this.url = `http://127.0.0.1:${this.#server.address().port}/`;
    return this;
  }

  close() {
    this.#server.closeAllConnections();
    return new Promise((resolve) => this.#server.close(resolve));
  }

  async #handle(request, response) {
    const { pathname } = new URL(request.url, this.url);
    if (pathname === "/violations") {
      this.violations.push(await readBody(request));
      return void response.end();
    }
    if (request.method === "GET" && !pathname.startsWith("/v1/") && pathname !== "/metrics") return this.#sendFile(pathname, response);
    if (this.key && request.headers.authorization !== `Bearer ${this.key}`) {
      return sendError(response, 401, "the API key is missing or wrong", "authentication_error");
    }
    if (pathname === "/v1/models") return sendJson(response, 200, { object: "list", data: MODELS });
    if (pathname === "/metrics") return void response.end(this.#metrics.text());
    if (pathname === "/v1/chat/completions") return this.#complete(JSON.parse(await readBody(request)), response);
    return sendError(response, 404, `no route '${pathname}'`);
  }

  async #sendFile(pathname, response) {
    const name = pathname === "/" ? "index.html" : pathname.slice(1);
    const data = /^[\w.]+$/.test(name) ? await readFile(join(PAGE, name)).catch(() => null) : null;
    if (!data) return sendError(response, 404, `no file '${pathname}'`);
    response.writeHead(200, {
      "content-type": TYPES[extname(name)], "content-security-policy": POLICY, "x-content-type-options": "nosniff",
      "referrer-policy": "no-referrer", "cache-control": "no-cache",
    });
    response.end(data);
  }

  async #complete(body, response) {
    this.requests.push(body);
    const prompt = body.messages.at(-1).content;
    const scenario = prompt.split(/\s/, 1)[0];
    if (scenario === "busy" && this.#busy++ === 0) {
      response.setHeader("retry-after", "2");
      return sendError(response, 429, "32 requests are waiting");
    }
    response.writeHead(200, { "content-type": "text/event-stream", "cache-control": "no-cache" });
    const stream = new MockStream(response, body);
    response.on("close", () => {
      if (!response.writableEnded) this.canceled += 1;
    });
    const delay = scenario === "slow" ? 40 : this.delay;
    stream.send({ role: "assistant", content: "" });
    if (ANSWERS[scenario]?.hasReasoning) {
      for (const piece of pieces(REASONING)) await stream.token({ reasoning: piece }, delay);
    }
    response.write(": ping\n\n");
    const text = scenario === "empty" ? "" : ANSWERS[scenario]?.text ?? `You said: ${prompt}`;
    let count = 0;
    for (const piece of pieces(text)) {
      await stream.token({ content: piece }, delay);
      count += 1;
      if (scenario === "cut" && count === 5) {
        await sleep(200); // a browser drops data that arrives together with the end of the connection
        return void response.destroy();
      }
      if (scenario === "fault" && count === 5) return stream.fault("the GPU reported an error");
    }
    return stream.finish();
  }
}

/** The events of one completion. */
class MockStream {
  #response;
  #model;
  #usage;

  constructor(response, { model, messages }) {
    this.#response = response;
    this.#model = model;
    const prompt_tokens = Math.ceil(JSON.stringify(messages).length / 4);
    this.#usage = { prompt_tokens, completion_tokens: 0, total_tokens: prompt_tokens };
  }

  send(delta, finish_reason = null) {
    this.#write({ choices: [{ index: 0, delta, finish_reason }], usage: this.#usage });
  }

  async token(delta, delay) {
    if (delay > 0) await sleep(delay);
    this.#usage.completion_tokens += 1;
    this.#usage.total_tokens += 1;
    this.send(delta);
  }

  fault(message) {
    this.#write({ error: { message, type: "server_error", param: null, code: null } });
    this.#response.end("data: [DONE]\n\n");
  }

  finish() {
    this.send({}, "stop");
    this.#write({ choices: [], usage: this.#usage });
    this.#response.end("data: [DONE]\n\n");
  }

  #write(fields) {
    if (this.#response.destroyed) return;
    const chunk = { id: "chatcmpl-1", object: "chat.completion.chunk", model: this.#model, ...fields };
    this.#response.write(`data: ${JSON.stringify(chunk)}\n\n`);
  }
}

/** Metrics of a server whose load changes with the time. */
class MockMetrics {
  #start = Date.now();
  #last = 0;
  #generated = 48_211_906;
  #prompts = 91_530_114;
  #finished = 118_402;
  #firstToken = new Map([[0.02, 0], [0.05, 0], [0.1, 0], [0.25, 0], [0.5, 0], [Infinity, 0]]);
  #between = new Map([[0.001, 0], [0.002, 0], [0.005, 0], [0.01, 0], [0.025, 0], [Infinity, 0]]);

  text() {
    const time = (Date.now() - this.#start) / 1000;
    const step = time - this.#last;
    this.#last = time;
    const load = 0.6 + 0.25 * Math.sin(time / 6) + 0.08 * Math.sin(time * 1.7) + 0.05 * Math.sin(time * 4.1);
    this.#generated += Math.round(load * 9100 * step);
    this.#prompts += Math.round(load * 15_400 * step);
    this.#finished += Math.round(load * 40 * step);
    observe(this.#firstToken, [0.1, 0.55, 0.86, 0.97, 0.995, 1], load * 40 * step);
    observe(this.#between, [0, 0.04, 0.3, 0.91, 0.996, 1], load * 9000 * step);
    const label = '{engine="0",model_name="example/model-20b"}';
    return `# HELP inferno_num_requests_running Requests that run.
# TYPE inferno_num_requests_running gauge
inferno_num_requests_running${label} ${Math.round(load * 110)}
inferno_num_requests_waiting${label} ${Math.max(0, Math.round((load - 0.75) * 60))}
inferno_kv_cache_usage_perc${label} ${(load * 0.7).toFixed(4)}
inferno_cache_config_info{block_size="16",num_gpu_blocks="180224"} 1
inferno_generation_tokens_total${label} ${this.#generated}
inferno_prompt_tokens_total${label} ${this.#prompts}
inferno_prefix_cache_queries_total${label} ${this.#prompts}
inferno_prefix_cache_hits_total${label} ${Math.round(this.#prompts * 0.62)}
inferno_request_success_total{finished_reason="stop"} ${this.#finished}
inferno_request_success_total{finished_reason="length"} 312
${buckets("time_to_first_token_seconds", this.#firstToken)}
${buckets("inter_token_latency_seconds", this.#between)}
`;
  }
}

function observe(histogram, shares, count) {
  [...histogram.keys()].forEach((bound, index) => histogram.set(bound, histogram.get(bound) + Math.round(shares[index] * count)));
}

function buckets(name, histogram) {
  const bound = (value) => (value === Infinity ? "+Inf" : value);
  return Array.from(histogram, ([le, count]) => `inferno_${name}_bucket{engine="0",le="${bound(le)}"} ${count}`).join("\n");
}

/** Splits a text into words, and words that are too long into parts, as a model's tokens arrive. */
function pieces(text) {
  const longest = text.length > 20_000 ? 2000 : 12;
  return text.match(new RegExp(`\\s*\\S{1,${longest}}|\\s+`, "gu")) ?? [];
}

async function readBody(request) {
  const parts = [];
  for await (const part of request) parts.push(part);
  return Buffer.concat(parts).toString();
}

function sendJson(response, status, value) {
  response.writeHead(status, { "content-type": "application/json" });
  response.end(JSON.stringify(value));
}

function sendError(response, status, message, type = "invalid_request_error") {
  sendJson(response, status, { error: { message, type, param: null, code: null } });
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const server = new MockServer();
  server.delay = 12;
  await server.listen(Number(process.argv[2] ?? 8010));
  console.log(server.url);
}
