// Renders Markdown as it arrives.

import { copyButton, el } from "./dom.js";
import { appendInline } from "./markdown_inline.js";
import { parseBlocks } from "./markdown_blocks.js";
import { visibleText } from "./text.js";

const CHUNK_LINES = 100;

/**
 * Shows Markdown in an element while the text grows. Only the last block is rendered again when text arrives: a block
 * is final as soon as a complete line starts the next one.
 */
export class MarkdownView {
  #element;
  #text = "";
  #start = 0; // where the last block starts
  #open = []; // the elements of the last block and of blocks whose first line is not complete
  #code = null; // the view of the last block, if it is a block of code

  constructor(element) {
    this.#element = element;
  }

  /** Shows `text`, which must start with the text of the last update. `isComplete` is true for the last update. */
  update(text, isComplete) {
    this.#text = text.replaceAll("\r", ""); // otherwise, an update could end between "\r" and "\n"
    const lines = this.#text.slice(this.#start).split("\n");
    const blocks = parseBlocks(lines);
    if (blocks.length === 1 && this.#code?.canShow(blocks[0])) {
      this.#code.update(blocks[0].text);
      return;
    }
    for (const element of this.#open) element.remove();
    this.#open = [];
    this.#code = null;
    const completeLines = isComplete ? lines.length : lines.length - 1;
    let last = 0;
    while (last + 1 < blocks.length && blocks[last + 1].line < completeLines) last += 1;
    blocks.forEach((block, index) => {
      const code = block.type === "code" ? new CodeView(block) : null;
      const element = code ? code.element : renderBlock(block);
      this.#element.append(element);
      if (index >= last) this.#open.push(element);
      if (index === last && last === blocks.length - 1) this.#code = code;
    });
    if (last > 0) this.#start += lines.slice(0, blocks[last].line).reduce((length, line) => length + line.length + 1, 0);
  }
}

/** A block of code with its language and a button that copies it. */
class CodeView {
  #language;
  #text = "";
  #shown = 0; // the length of the text in complete chunks
  #code = el("code", { dir: "ltr" });
  #chunk = null;

  constructor({ language, text }) {
    this.#language = language;
    const name = visibleText(language).slice(0, 40);
    const header = el("div", { class: "code-header" }, el("span", {}, name), copyButton("Copy code", () => this.#text));
    // A scrollable area must be reachable with the keyboard.
    const pre = el("pre", { tabindex: "0", role: "region", "aria-label": name ? `Code: ${name}` : "Code" }, this.#code);
    this.element = el("div", { class: "code" }, header, pre);
    this.update(text);
  }

  /** Returns whether `update` can show `block`: a block of code whose language has not changed as more text arrived. */
  canShow(block) {
    return block.type === "code" && block.language === this.#language;
  }

  /** Shows `text` in chunks of lines, so that the browser lays out only the last chunk when more text arrives. */
  update(text) {
    if (!text.startsWith(this.#text)) {
      this.#code.replaceChildren();
      this.#shown = 0;
      this.#chunk = null;
    }
    this.#text = text;
    const lines = text.slice(this.#shown).split("\n");
    for (let at = 0; at < lines.length; at += CHUNK_LINES) {
      const chunk = lines.slice(at, at + CHUNK_LINES).join("\n");
      if (!this.#chunk) {
        this.#chunk = el("span", { class: "chunk" });
        this.#code.append(this.#chunk);
      }
      this.#chunk.textContent = visibleText(chunk);
      if (at + CHUNK_LINES < lines.length) {
        this.#chunk = null;
        this.#shown += chunk.length + 1;
      }
    }
  }
}

function renderBlocks(parent, blocks) {
  parent.append(...blocks.map(renderBlock));
}

function renderBlock(block) {
  switch (block.type) {
    case "code": return new CodeView(block).element;
    case "math": return el("pre", { class: "math", tabindex: "0" }, visibleText(block.text));
    case "rule": return el("hr");
    case "heading": return inline(`h${Math.min(block.level + 2, 6)}`, block.text, { class: `level-${block.level}` });
    case "quote": return renderQuote(block);
    case "list": return renderList(block);
    case "table": return renderTable(block);
    default: return inline("p", block.text);
  }
}

function inline(tag, text, properties = {}) {
  const element = el(tag, properties);
  appendInline(element, text);
  return withDirection(element);
}

/**
 * Sets the direction of the text from its first letter. Call it after adding all children, because Chromium computes
 * the direction again for each child.
 */
function withDirection(element) {
  element.dir = "auto";
  return element;
}

function renderQuote({ blocks }) {
  const quote = el("blockquote");
  renderBlocks(quote, blocks);
  return quote;
}

function renderList({ start, isLoose, items }) {
  const list = start === null ? el("ul") : el("ol", { start: start === 1 ? null : start });
  for (const { checked, blocks } of items) {
    const item = el("li");
    if (checked !== null) {
      item.className = "task";
      item.append(el("input", { type: "checkbox", disabled: true, checked, "aria-label": checked ? "Done" : "Open" }), " ");
    }
    for (const block of blocks) {
      if (block.type === "paragraph" && !isLoose) appendInline(item, block.text);
      else item.append(renderBlock(block));
    }
    list.append(withDirection(item));
  }
  return list;
}

function renderTable({ alignments, header, rows }) {
  const row = (tag, cells) => el("tr", {}, ...cells.map((cell, column) => {
    return inline(tag, cell, { class: `align-${alignments[column]}`, scope: tag === "th" ? "col" : null });
  }));
  const body = rows.map((cells) => row("td", cells));
  const table = el("table", {}, el("thead", {}, row("th", header)), el("tbody", {}, ...body));
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table);
}
