// The messages of the open conversation.

import { contentOf, pathTo, siblings } from "./conversation.js";
import { announce, byId, copyButton, el, growWithText, icon, iconButton } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { formatBytes, formatCount, formatDuration, formatNumber, formatSeconds, visibleText } from "./text.js";

const MAX_RENDER_SHARE = 0.2; // the share of the time that rendering may take while an answer streams
const BOTTOM = 40; // the distance from the end, in pixels, that still counts as the end

/** Shows the messages of a `Chat` and keeps the end in sight while an answer streams, unless the reader scrolls up. */
export class MessagesView {
  #chat;
  #views = new Map(); // the id of a node → its view
  #scroller = byId("scroller");
  #isAtEnd = true;
  #lastTop = 0;
  #isScheduled = false;
  #notBefore = 0;

  constructor(chat) {
    this.#chat = chat;
    chat.addEventListener("open", () => {
      this.#views.clear();
      byId("messages").replaceChildren();
      this.#isAtEnd = true;
      this.#update();
    });
    chat.addEventListener("change", () => this.#update());
    chat.addEventListener("running", () => this.#showRunning());
    chat.addEventListener("progress", () => this.#schedule());
    this.#scroller.addEventListener("scroll", () => this.#noticeScroll(), { passive: true });
    byId("jump").addEventListener("click", () => this.scrollToEnd());
    // The height of the messages changes when a font loads, the window is resized or thoughts are opened.
    new ResizeObserver(() => this.#isAtEnd && this.scrollToEnd()).observe(byId("messages"));
  }

  /** Turns the last message of the user into a text area. */
  editLast() {
    const node = this.#chat.lastUserNode;
    if (node && !this.#chat.runningNode) this.#views.get(node.id).edit();
  }

  /** Scrolls to the last message and follows it. */
  scrollToEnd() {
    this.#isAtEnd = true;
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
    byId("jump").hidden = true;
  }

  #update() {
    const path = pathTo(this.#chat.conversation);
    byId("welcome").hidden = path.length > 0;
    const elements = path.map((node) => {
      if (!this.#views.has(node.id)) this.#views.set(node.id, this.#create(node));
      const view = this.#views.get(node.id);
      view.update();
      return view.element;
    });
    const messages = byId("messages");
    elements.forEach((element, index) => {
      if (messages.children[index] !== element) messages.insertBefore(element, messages.children[index] ?? null);
    });
    while (messages.children.length > elements.length) messages.lastElementChild.remove();
    this.scrollToEnd();
  }

  #create(node) {
    return node.role === "user" ? new UserView(this.#chat, node) : new AnswerView(this.#chat, node);
  }

  #showRunning() {
    const { runningNode, conversation } = this.#chat;
    byId("messages").setAttribute("aria-busy", String(Boolean(runningNode))); // a screen reader waits for the end
    if (runningNode) announce("The model answers");
    else if (conversation.leaf) announce("The answer has ended");
    for (const view of this.#views.values()) view.update();
  }

  /** Renders the growing message in the next frame, or later if rendering takes too large a share of the time. */
  #schedule() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    const render = () => requestAnimationFrame(() => {
      this.#isScheduled = false;
      const start = performance.now();
      const node = this.#chat.runningNode ?? this.#chat.conversation.nodes[this.#chat.conversation.leaf];
      if (node) this.#views.get(node.id)?.update();
      if (this.#isAtEnd) this.scrollToEnd();
      const renderMs = performance.now() - start;
      this.#notBefore = performance.now() + renderMs / MAX_RENDER_SHARE - renderMs;
    });
    const wait = this.#notBefore - performance.now();
    if (wait > 0) setTimeout(render, wait);
    else render();
  }

  #noticeScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    // New text also increases the distance from the end. Only a smaller `scrollTop` shows that the reader scrolled up.
    if (scrollHeight - scrollTop - clientHeight < BOTTOM) this.#isAtEnd = true;
    else if (scrollTop < this.#lastTop) this.#isAtEnd = false;
    this.#lastTop = scrollTop;
    byId("jump").hidden = this.#isAtEnd;
  }
}

/** A message of the user. */
class UserView {
  #chat;
  #node;
  #bubble = el("div", { class: "bubble", dir: "auto" });
  #actions = el("div", { class: "actions" });

  constructor(chat, node) {
    this.#chat = chat;
    this.#node = node;
    for (const { name, size, text } of node.files ?? []) {
      const summary = el("summary", {}, icon("file"), visibleText(name), el("span", {}, formatBytes(size)));
      this.#bubble.append(el("details", { class: "file" }, summary, el("pre", { tabindex: "0" }, visibleText(text))));
    }
    if (node.text) this.#bubble.append(el("p", {}, visibleText(node.text)));
    this.element = el("article", { class: "message user", "aria-label": "You" }, this.#bubble, this.#actions);
  }

  update() {
    this.#actions.replaceChildren(
      ...branchButtons(this.#chat, this.#node),
      copyButton("Copy message", () => contentOf(this.#node)),
      ...(this.#chat.runningNode ? [] : [iconButton("edit", "Edit message", () => this.edit())]),
    );
  }

  /** Replaces the message by a text area until the user sends or cancels the change. */
  edit() {
    const area = el("textarea", { "aria-label": "Edit the message", rows: "1", oninput: () => growWithText(area) });
    area.value = this.#node.text;
    const finish = () => {
      form.replaceWith(this.#bubble, this.#actions);
      byId("prompt").focus();
    };
    const form = el("form", {
      class: "edit",
      onsubmit: (event) => {
        event.preventDefault();
        const text = area.value.trim();
        if (!text && !this.#node.files?.length) return;
        finish();
        this.#chat.edit(this.#node, text);
      },
      onkeydown: (event) => {
        if (event.isComposing) return;
        if (event.key === "Escape") {
          event.stopPropagation();
          finish();
        } else if (event.key === "Enter" && !event.shiftKey && event.target === area) {
          event.preventDefault();
          form.requestSubmit();
        }
      },
    }, area, el("div", { class: "buttons" },
      el("button", { type: "button", onclick: finish }, "Cancel"),
      el("button", { type: "submit", class: "primary" }, "Send")));
    this.#actions.remove();
    this.#bubble.replaceWith(form);
    growWithText(area);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

/** An answer of the model. */
class AnswerView {
  #chat;
  #node;
  #thoughts = new ThoughtsView();
  #body = el("div", { class: "markdown" });
  #markdown = new MarkdownView(this.#body);
  #notice = el("div", { class: "notice" });
  #stats = el("p", { class: "stats" });
  #actions = el("div", { class: "actions" });
  #isFinal = false;

  constructor(chat, node) {
    this.#chat = chat;
    this.#node = node;
    const footer = el("footer", {}, this.#actions, this.#stats);
    this.element = el("article", { class: "message answer", "aria-label": "Answer" },
      this.#thoughts.element, this.#body, this.#notice, footer);
  }

  update() {
    const node = this.#node;
    const isRunning = this.#chat.runningNode === node;
    this.element.classList.toggle("running", isRunning);
    if (!this.#isFinal) {
      this.#thoughts.update(node, isRunning);
      this.#markdown.update(node.text, !isRunning);
      this.#isFinal = !isRunning;
    }
    this.#stats.textContent = stats(node, isRunning);
    this.#notice.replaceChildren(...this.#notices(isRunning));
    this.#actions.replaceChildren(...(isRunning ? [] : this.#buttons()));
  }

  #notices(isRunning) {
    const { error, finish, text } = this.#node;
    if (isRunning) return [];
    if (error) {
      const again = () => this.#chat.regenerate(this.#node);
      const words = el("p", {}, el("strong", {}, visibleText(error.title)), " ", visibleText(error.message));
      const button = el("button", { type: "button", onclick: again }, icon("retry"), "Try again");
      return [el("div", { class: "error", role: "alert" }, words, button)];
    }
    if (finish === "length") return [el("p", {}, "The answer reached the token limit.")];
    if (finish === "stopped") return [el("p", {}, "You stopped this answer.")];
    if (!finish) return [el("p", {}, "The page closed before this answer was complete.")];
    return text ? [] : [el("p", {}, "The answer is empty.")];
  }

  #buttons() {
    return [
      ...branchButtons(this.#chat, this.#node),
      ...(this.#node.text ? [copyButton("Copy answer", () => this.#node.text)] : []),
      ...(this.#chat.runningNode ? [] : [iconButton("retry", "Answer again", () => this.#chat.regenerate(this.#node))]),
    ];
  }
}

/** The reasoning before an answer. It is collapsed until the reader opens it. */
class ThoughtsView {
  #summary = el("summary");
  #text = el("div", { class: "thoughts-text", dir: "auto" });
  #shown = 0;

  constructor() {
    this.element = el("details", { class: "thoughts", hidden: true }, this.#summary, this.#text);
  }

  update({ reasoning, text, thinkingSeconds }, isRunning) {
    const isThinking = isRunning && !text;
    this.element.hidden = !reasoning && !isThinking;
    this.element.classList.toggle("thinking", isThinking);
    if (!reasoning) {
      this.#summary.textContent = "Waiting for the first token";
      return;
    }
    const time = formatDuration(thinkingSeconds ?? 0);
    this.#summary.textContent = isThinking ? `Thinking, ${time}` : `Thought for ${time}`;
    // Wait for the second half of a surrogate pair, because `visibleText` recognizes only whole characters.
    const end = isRunning && /[\ud800-\udbff]$/.test(reasoning) ? reasoning.length - 1 : reasoning.length;
    this.#text.append(visibleText(reasoning.slice(this.#shown, end)));
    this.#shown = end;
  }
}

function branchButtons(chat, node) {
  const all = siblings(chat.conversation, node);
  if (all.length < 2 || chat.runningNode) return [];
  const at = all.indexOf(node);
  const previous = iconButton("left", "Previous version", () => chat.switchBranch(node, -1));
  const next = iconButton("right", "Next version", () => chat.switchBranch(node, 1));
  previous.disabled = at === 0;
  next.disabled = at === all.length - 1;
  return [el("span", { class: "branches" }, previous, `${at + 1} of ${all.length}`, next)];
}

/** Describes the speed of an answer: "412 tokens · 148 tokens/s · first token after 34 ms · model name". */
function stats({ usage, firstTokenSeconds, seconds, model }, isRunning) {
  if (firstTokenSeconds === undefined) return "";
  const parts = [];
  const tokens = usage?.completion_tokens;
  if (tokens) {
    parts.push(tokens === 1 ? "1 token" : `${formatCount(tokens)} tokens`);
    const decoding = seconds - firstTokenSeconds;
    if (tokens > 1 && decoding > 0) parts.push(`${formatNumber((tokens - 1) / decoding)} tokens/s`);
  }
  parts.push(`first token after ${formatSeconds(firstTokenSeconds)}`);
  if (model && !isRunning) parts.push(visibleText(model));
  return parts.join(" · ");
}
