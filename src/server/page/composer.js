// The box for writing a message and attaching text files.

import { byId, el, growWithText, icon, iconButton } from "./dom.js";
import { formatBytes } from "./text.js";

const MAX_FILE_BYTES = 1024 * 1024;

/** The message box. `actions` has `send(text, files)`, `stop()`, `editLast()` and `report(message)`. */
export class Composer {
  #prompt = byId("prompt");
  #button = byId("send");
  #actions;
  #files = [];
  #isRunning = false;

  constructor(actions) {
    this.#actions = actions;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#isRunning) this.#actions.stop();
      else this.#submit();
    });
    this.#prompt.addEventListener("keydown", (event) => this.#press(event));
    this.#prompt.addEventListener("input", () => this.#show());
    this.#prompt.addEventListener("paste", (event) => this.#receive(event, event.clipboardData));
    byId("attach").addEventListener("click", () => byId("file-input").click());
    byId("file-input").addEventListener("change", async ({ target }) => {
      await this.#attach([...target.files]);
      target.value = "";
    });
    document.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    document.addEventListener("drop", (event) => this.#receive(event, event.dataTransfer));
    this.#show();
  }

  /** Moves the focus into the box. */
  focus() {
    this.#prompt.focus();
  }

  /** Sets whether an answer is streaming. While it is, the button stops the answer instead of sending a message. */
  setRunning(isRunning) {
    this.#isRunning = isRunning;
    this.#button.replaceChildren(icon(isRunning ? "stop" : "send"));
    this.#button.title = isRunning ? "Stop (Esc)" : "Send";
    this.#button.setAttribute("aria-label", isRunning ? "Stop the answer" : "Send");
    this.#show();
  }

  #press(event) {
    if (event.isComposing) return; // in an input method, Enter confirms a word
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      if (!this.#isRunning) this.#submit();
    } else if (event.key === "ArrowUp" && this.#prompt.value === "") {
      event.preventDefault();
      this.#actions.editLast();
    }
  }

  #submit() {
    const text = this.#prompt.value.trim();
    if (!text && this.#files.length === 0) return;
    const files = this.#files;
    this.#prompt.value = "";
    this.#files = [];
    this.#show();
    this.#actions.send(text, files);
  }

  #receive(event, { files }) {
    if (files.length === 0) return;
    event.preventDefault();
    this.#attach([...files]);
  }

  async #attach(files) {
    for (const file of files) {
      try {
        this.#files.push({ name: file.name, size: file.size, text: await readText(file) });
      } catch (error) {
        this.#actions.report(`Cannot attach ${file.name}: ${error.message}.`);
      }
    }
    this.#show();
    this.focus();
  }

  #show() {
    growWithText(this.#prompt);
    byId("files").replaceChildren(...this.#files.map((file) => {
      const remove = iconButton("cross", `Remove ${file.name}`, () => {
        this.#files = this.#files.filter((other) => other !== file);
        this.#show();
        this.focus();
      });
      return el("li", {}, icon("file"), `${file.name}, ${formatBytes(file.size)}`, remove);
    }));
    this.#button.disabled = !this.#isRunning && this.#prompt.value.trim() === "" && this.#files.length === 0;
  }
}

async function readText(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(`it has ${formatBytes(file.size)}, the limit is 1 MiB`);
  const decoder = new TextDecoder("utf-8", { fatal: true });
  let text;
  try {
    text = decoder.decode(await file.arrayBuffer());
  } catch {
    throw new Error("it is not UTF-8 text");
  }
  if (text.includes("\0")) throw new Error("it is not text");
  return text;
}
