// Drives a headless Chromium over the DevTools protocol. Uses a pipe, so that it needs neither a port nor a package.

import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const TIMEOUT = 10_000;
const KEYS = {
  Enter: { code: "Enter", keyCode: 13, text: "\r" },
  Escape: { code: "Escape", keyCode: 27 },
  Tab: { code: "Tab", keyCode: 9 },
  ArrowUp: { code: "ArrowUp", keyCode: 38 },
  ArrowDown: { code: "ArrowDown", keyCode: 40 },
  F2: { code: "F2", keyCode: 113 },
  Delete: { code: "Delete", keyCode: 46 },
};
const MODIFIERS = { Alt: 1, Control: 2, Meta: 4, Shift: 8 };

/** A Chromium process. `CHROMIUM` names the program. */
export class Browser {
  #process;
  #profile = mkdtempSync(join(tmpdir(), "page-test-"));
  #calls = new Map();
  #sessions = new Map();
  #lastId = 0;
  #received = [];

  constructor() {
    const sandbox = process.getuid?.() === 0 ? ["--no-sandbox"] : []; // the sandbox does not start as root
    this.#process = spawn(process.env.CHROMIUM ?? "chromium", [
      "--headless=new", "--remote-debugging-pipe", `--user-data-dir=${this.#profile}`, "--no-first-run", "--disable-gpu",
      "--disable-background-networking", "--disable-component-update",
      "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4", // a mouse
      "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", ...sandbox,
    ], { stdio: ["ignore", "ignore", "ignore", "pipe", "pipe"] });
    this.#process.on("error", (error) => this.#fail(new Error(`cannot start Chromium: ${error.message}`)));
    this.#process.on("exit", () => this.#fail(new Error("Chromium has ended")));
    this.#process.stdio[4].on("data", (data) => this.#receive(data));
  }

  /** Opens an empty page with its own storage. */
  async newPage() {
    const { browserContextId } = await this.send("Target.createBrowserContext");
    return this.newTab(browserContextId);
  }

  /** Opens an empty page in a storage that exists. */
  async newTab(browserContextId) {
    const { targetId } = await this.send("Target.createTarget", { url: "about:blank", browserContextId });
    const { sessionId } = await this.send("Target.attachToTarget", { targetId, flatten: true });
    const page = new Page(this, sessionId, browserContextId);
    this.#sessions.set(sessionId, page);
    await page.start();
    return page;
  }

  /** Sends a command. Resolves to its result. */
  send(method, params = {}, sessionId = undefined) {
    const id = ++this.#lastId;
    return new Promise((resolve, reject) => {
      this.#calls.set(id, { resolve, reject, method });
      this.#process.stdio[3].write(`${JSON.stringify({ id, method, params, sessionId })}\0`);
    });
  }

  /** Ends Chromium and removes its profile. */
  async close() {
    const ended = new Promise((resolve) => this.#process.once("exit", resolve));
    this.send("Browser.close").catch(() => {});
    await ended;
    rmSync(this.#profile, { recursive: true, force: true, maxRetries: 5, retryDelay: 100 });
  }

  #receive(data) {
    let start = 0;
    for (let end = data.indexOf(0); end >= 0; end = data.indexOf(0, start)) {
      const message = JSON.parse(Buffer.concat([...this.#received, data.subarray(start, end)]).toString());
      this.#received = [];
      start = end + 1;
      this.#take(message);
    }
    if (start < data.length) this.#received.push(data.subarray(start));
  }

  #take({ id, result, error, method, params, sessionId }) {
    if (id === undefined) {
      this.#sessions.get(sessionId)?.take(method, params);
      return;
    }
    const call = this.#calls.get(id);
    this.#calls.delete(id);
    if (error) call.reject(new Error(`${call.method}: ${error.message}`));
    else call.resolve(result);
  }

  #fail(error) {
    for (const { reject } of this.#calls.values()) reject(error);
    this.#calls.clear();
  }
}

/** A tab. Records everything that it requests and every error. */
export class Page {
  /** The addresses that the page has requested. */
  requests = [];
  /** Exceptions, errors on the console and dialogs of the browser. */
  problems = [];

  #browser;
  #sessionId;
  #context;

  constructor(browser, sessionId, context) {
    this.#browser = browser;
    this.#sessionId = sessionId;
    this.#context = context;
  }

  async start() {
    for (const domain of ["Page", "Runtime", "Network", "Log"]) await this.send(`${domain}.enable`);
    await this.resize(1280, 800);
  }

  send(method, params = {}) {
    return this.#browser.send(method, params, this.#sessionId);
  }

  /** Opens another tab with the same storage. */
  sibling() {
    return this.#browser.newTab(this.#context);
  }

  take(method, params) {
    if (method === "Network.requestWillBeSent") this.requests.push(params.request.url);
    if (method === "Runtime.exceptionThrown") this.problems.push(params.exceptionDetails.exception?.description ?? "exception");
    if (method === "Log.entryAdded" && params.entry.level === "error") this.problems.push(`${params.entry.text} ${params.entry.url ?? ""}`);
    if (method === "Page.javascriptDialogOpening") {
      this.problems.push(`dialog: ${params.message}`);
      this.send("Page.handleJavaScriptDialog", { accept: true });
    }
  }

  async resize(width, height, { isPhone = false, scale = 1 } = {}) {
    if (isPhone) await this.send("Emulation.setTouchEmulationEnabled", { enabled: true });
    await this.send("Emulation.setDeviceMetricsOverride", { width, height, deviceScaleFactor: scale, mobile: isPhone });
  }

  /** Sets media features, for example `{ "prefers-color-scheme": "dark" }`. */
  emulate(features) {
    return this.send("Emulation.setEmulatedMedia", { features: Object.entries(features).map(([name, value]) => ({ name, value })) });
  }

  async goto(url) {
    await this.send("Page.navigate", { url });
    await this.ready();
  }

  async reload() {
    await this.evaluate(() => { window.isOld = true; });
    await this.send("Page.reload");
    await this.waitFor(() => !window.isOld);
    await this.ready();
  }

  ready() {
    return this.waitFor(() => document.readyState === "complete" && document.getElementById("model")?.disabled === false);
  }

  /** Runs a function in the page and returns its result. */
  async evaluate(run, ...values) {
    const expression = `(${run})(...${JSON.stringify(values)})`;
    const { result, exceptionDetails } = await this.send("Runtime.evaluate", { expression, awaitPromise: true, returnByValue: true });
    if (exceptionDetails) throw new Error(exceptionDetails.exception?.description ?? exceptionDetails.text);
    return result.value;
  }

  /** Waits until a function in the page returns something true, and returns it. */
  async waitFor(run, ...values) {
    const end = Date.now() + TIMEOUT;
    for (;;) {
      const value = await this.evaluate(run, ...values).catch((error) => {
        if (!/context|navigat/i.test(error.message)) throw error; // the page is being replaced
      });
      if (value) return value;
      if (Date.now() > end) throw new Error(`timed out: ${run} ${JSON.stringify(values)}`);
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
  }

  /** Clicks in the middle of the first visible element that matches. */
  async click(selector) {
    const { x, y } = await this.waitFor((wanted) => {
      const element = [...document.querySelectorAll(wanted)].find((each) => each.checkVisibility());
      if (!element) return null;
      element.scrollIntoView({ block: "nearest" });
      const box = element.getBoundingClientRect();
      return { x: box.x + box.width / 2, y: box.y + box.height / 2 };
    }, selector);
    await this.send("Input.dispatchMouseEvent", { type: "mouseMoved", x, y });
    await this.send("Input.dispatchMouseEvent", { type: "mousePressed", x, y, button: "left", clickCount: 1 });
    await this.send("Input.dispatchMouseEvent", { type: "mouseReleased", x, y, button: "left", clickCount: 1 });
  }

  /** Types text into the focused element. */
  type(text) {
    return this.send("Input.insertText", { text });
  }

  /** Presses a key, for example "Enter" or "Control+k". */
  async press(combination) {
    const parts = combination.split("+");
    const key = parts.pop();
    const modifiers = parts.reduce((sum, name) => sum + MODIFIERS[name], 0);
    const { code = `Key${key.toUpperCase()}`, keyCode = key.toUpperCase().charCodeAt(0), text } = KEYS[key] ?? {};
    const event = { key, code, windowsVirtualKeyCode: keyCode, modifiers };
    await this.send("Input.dispatchKeyEvent", { type: text ? "keyDown" : "rawKeyDown", text, ...event });
    await this.send("Input.dispatchKeyEvent", { type: "keyUp", ...event });
  }

  /** Puts files into a file input. */
  async chooseFiles(selector, files) {
    const { root } = await this.send("DOM.getDocument");
    const { nodeId } = await this.send("DOM.querySelector", { nodeId: root.nodeId, selector });
    await this.send("DOM.setFileInputFiles", { nodeId, files });
  }

  /** Closes the tab and removes its storage. */
  close() {
    return this.#browser.send("Target.disposeBrowserContext", { browserContextId: this.#context });
  }

  /** Returns a PNG of what is visible. */
  async screenshot() {
    const { data } = await this.send("Page.captureScreenshot", { format: "png" });
    return Buffer.from(data, "base64");
  }
}
