// The live view of the server: reads /metrics once a second while it is visible.

import { byId, el, iconButton, svg } from "./dom.js";
import { difference, histogram, parseMetrics, quantile, total } from "./metrics.js";
import { formatCount, formatNumber, formatSeconds } from "./text.js";

const PREFIX = "inferno_";
const INTERVAL = 1000;
const SAMPLES = 61; // a minute of samples, plus the one before it for the first rate
const CHART = { width: 240, height: 40 };

/** The panel. `api` reads the metrics. */
export class ServerView {
  #api;
  #panel = byId("server");
  #toggle = byId("toggle-server");
  #samples = []; // the metrics of the last minute, newest last
  #timer = null;
  #note = el("p", { class: "note", role: "status" });
  #rows = new Map(); // the name of a row → its value
  #charts = new Map();

  constructor(api) {
    this.#api = api;
    this.#build();
    this.#toggle.addEventListener("click", () => this.toggle());
    document.addEventListener("visibilitychange", () => this.#schedule());
  }

  /** Whether the panel is open. */
  get isOpen() {
    return !this.#panel.hidden;
  }

  /** Opens or closes the panel. */
  toggle() {
    this.#panel.hidden = !this.#panel.hidden;
    this.#toggle.setAttribute("aria-expanded", String(this.isOpen));
    this.#samples = []; // the time while the panel was closed would distort the rates
    this.#schedule();
  }

  #build() {
    this.#panel.append(
      el("header", {}, el("h2", {}, "Server"), iconButton("cross", "Close the live view", () => {
        this.toggle();
        this.#toggle.focus();
      })),
      this.#note,
      this.#card("Generation", "generation", "tokens/s", ["Prompts", "Generated in total"]),
      this.#card("Requests", "running", "running", ["Waiting", "Finished in total"]),
      this.#card("KV cache", "kv", "used", ["Size", "Prefix hits"]),
      this.#table("Latency", ["Time to first token", "Between tokens"]),
      el("p", { class: "note" }, "Rates cover the last second. Charts and latencies cover the last minute."),
    );
  }

  /** Creates a card: a large number, a chart of its values over the last minute, and rows with other values. */
  #card(title, name, unit, rows) {
    const value = el("strong", {}, "–");
    const line = svg("path", { class: "line" });
    const area = svg("path", { class: "area" });
    const chart = svg("svg", {
      class: "chart", viewBox: `0 0 ${CHART.width} ${CHART.height}`, preserveAspectRatio: "none", "aria-hidden": "true",
    }, area, line);
    this.#rows.set(name, value);
    this.#charts.set(name, { line, area });
    return el("section", {}, el("h3", {}, title), el("p", { class: "figure" }, value, ` ${unit}`), chart,
      el("dl", {}, ...rows.flatMap((row) => [el("dt", {}, row), this.#cell("dd", row)])));
  }

  #table(title, rows) {
    const head = el("tr", {}, el("td"), el("th", { scope: "col" }, "p50"), el("th", { scope: "col" }, "p99"));
    const body = rows.map((row) => el("tr", {}, el("th", { scope: "row" }, row),
      this.#cell("td", `${row} p50`), this.#cell("td", `${row} p99`)));
    return el("section", {}, el("h3", {}, title), el("table", {}, head, ...body));
  }

  #cell(tag, name) {
    const cell = el(tag, {}, "–");
    this.#rows.set(name, cell);
    return cell;
  }

  #schedule() {
    clearTimeout(this.#timer);
    if (!this.isOpen || document.hidden) return;
    this.#timer = setTimeout(() => this.#poll(), this.#samples.length > 0 ? INTERVAL : 0);
  }

  async #poll() {
    try {
      const metrics = parseMetrics(await this.#api.metrics(), PREFIX);
      this.#samples = [...this.#samples, { time: performance.now(), metrics }].slice(-SAMPLES);
      this.#note.textContent = "";
      this.#show();
    } catch (error) {
      this.#note.textContent = `${error.title ?? "Cannot read the metrics"}. ${error.message}`;
    }
    this.#schedule();
  }

  #show() {
    const { metrics } = this.#samples.at(-1);
    const get = (name) => total(metrics, name);
    this.#showSeries("generation", this.#rates("generation_tokens_total"), formatNumber);
    this.#showSeries("running", this.#values("num_requests_running"), formatCount);
    this.#showSeries("kv", this.#values("kv_cache_usage_perc"), formatShare, 1);
    this.#showRow("Prompts", this.#rates("prompt_tokens_total").at(-1), (rate) => `${formatNumber(rate)} tokens/s`);
    this.#showRow("Generated in total", get("generation_tokens_total"), (count) => `${formatCount(count)} tokens`);
    this.#showRow("Waiting", get("num_requests_waiting"), formatCount);
    this.#showRow("Finished in total", get("request_success_total"), formatCount);
    const { num_gpu_blocks: blocks, block_size: size } = metrics.get("cache_config_info")?.[0].labels ?? {};
    this.#showRow("Size", blocks * size, (tokens) => `${formatCount(tokens)} tokens`);
    this.#showRow("Prefix hits", get("prefix_cache_hits_total") / get("prefix_cache_queries_total"), formatShare);
    this.#showLatency("Time to first token", "time_to_first_token_seconds");
    this.#showLatency("Between tokens", "inter_token_latency_seconds");
  }

  #showLatency(row, name) {
    const [first, last] = [this.#samples[0], this.#samples.at(-1)].map(({ metrics }) => histogram(metrics, name));
    const buckets = difference(last, first);
    this.#showRow(`${row} p50`, quantile(buckets, 0.5), formatSeconds);
    this.#showRow(`${row} p99`, quantile(buckets, 0.99), formatSeconds);
  }

  #values(name) {
    return this.#samples.map(({ metrics }) => total(metrics, name));
  }

  /** Returns the increase of a counter per second, between each sample and the next. */
  #rates(name) {
    return this.#samples.slice(1).map(({ time, metrics }, index) => {
      const before = this.#samples[index];
      const increase = total(metrics, name) - total(before.metrics, name);
      return Math.max(0, (increase * 1000) / (time - before.time)); // counters start at 0 again after a restart of the server
    });
  }

  #showRow(name, value, format) {
    this.#rows.get(name).textContent = value === undefined || Number.isNaN(value) ? "–" : format(value);
  }

  #showSeries(name, values, format, highest = Math.max(1, ...values)) {
    this.#showRow(name, values.at(-1), format);
    const step = CHART.width / (SAMPLES - 2);
    const first = CHART.width - step * (values.length - 1);
    const points = values.map((value, index) => {
      const y = CHART.height - 1 - ((value || 0) / highest) * (CHART.height - 2);
      return `${(first + index * step).toFixed(1)} ${y.toFixed(1)}`;
    });
    const line = points.length > 1 ? `M${points.join("L")}` : "";
    const { line: path, area } = this.#charts.get(name);
    path.setAttribute("d", line);
    area.setAttribute("d", line && `${line}L${CHART.width} ${CHART.height}L${first.toFixed(1)} ${CHART.height}Z`);
  }
}

function formatShare(share) {
  return `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
}
