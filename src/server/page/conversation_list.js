// The list of conversations in the sidebar.

import { exportText } from "./conversation.js";
import { byId, download, el, iconButton } from "./dom.js";
import { visibleText } from "./text.js";

const DAY = 24 * 60 * 60 * 1000;

/** Shows all conversations, newest first. */
export class ConversationList {
  #chat;
  #store;
  #onRemove;
  #conversations = new Map(); // by id
  #renaming = null;

  /** Calls `onRemove(conversation)` after the user has deleted a conversation. */
  constructor(chat, store, onRemove) {
    this.#chat = chat;
    this.#store = store;
    this.#onRemove = onRemove;
    chat.addEventListener("saved", ({ detail }) => {
      this.#conversations.set(detail.conversation.id, detail.conversation);
      this.#show();
    });
    chat.addEventListener("removed", ({ detail }) => {
      this.#conversations.delete(detail.id);
      this.#show();
    });
    chat.addEventListener("open", () => this.#show());
    chat.addEventListener("running", () => this.#show());
  }

  /** Reads the conversations again and shows them. */
  async refresh() {
    const all = await this.#store.all();
    this.#conversations = new Map(all.map((conversation) => [conversation.id, conversation]));
    this.#show();
  }

  /** Returns the conversation with this id, or undefined. */
  find(id) {
    return this.#conversations.get(id);
  }

  /** Returns all conversations, newest first. */
  all() {
    return [...this.#conversations.values()].sort((a, b) => b.updated - a.updated);
  }

  #show() {
    if (this.#renaming) return; // a new list would replace the text field for the new title
    const groups = new Map();
    for (const conversation of this.all()) {
      const name = ageOf(conversation.updated);
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(this.#entry(conversation));
    }
    const sections = [...groups].map(([name, entries]) => el("section", {}, el("h2", {}, name), el("ul", {}, ...entries)));
    const focused = document.activeElement?.closest("#conversations li")?.dataset.id;
    byId("conversations").replaceChildren(...sections);
    if (focused) byId("conversations").querySelector(`li[data-id="${CSS.escape(focused)}"] button`)?.focus();
  }

  #entry(conversation) {
    const isOpen = conversation.id === this.#chat.conversation.id;
    const title = visibleText(conversation.title);
    const open = el("button", {
      type: "button",
      class: "title",
      title,
      "aria-current": isOpen ? "page" : null,
      onclick: () => this.#chat.open(conversation),
      onkeydown: (event) => {
        if (event.key === "F2") this.#rename(conversation, open);
        if (event.key === "Delete") this.#remove(conversation);
      },
    }, title);
    if (this.#chat.isRunning(conversation.id)) {
      open.append(el("span", { class: "dot", role: "img", "aria-label": "answering" }));
    }
    const actions = el("span", { class: "entry-actions" },
      iconButton("edit", `Rename ${title}`, () => this.#rename(conversation, open)),
      iconButton("save", `Export ${title}`, () => download("conversation.json", exportText([conversation]))),
      iconButton("trash", `Delete ${title}`, () => this.#remove(conversation)));
    return el("li", { "data-id": conversation.id, class: isOpen ? "open" : null }, open, actions);
  }

  #rename(conversation, button) {
    const finish = (isKept) => {
      if (this.#renaming !== input) return;
      this.#renaming = null;
      const title = input.value.trim();
      if (isKept && title) this.#chat.rename(conversation, title);
      this.#show();
    };
    const input = el("input", {
      class: "title",
      "aria-label": "Title",
      maxlength: "200",
      onblur: () => finish(true),
      onkeydown: (event) => {
        if (event.key !== "Enter" && event.key !== "Escape") return;
        event.stopPropagation();
        finish(event.key === "Enter");
      },
    });
    input.value = conversation.title;
    this.#renaming = input;
    button.replaceWith(input);
    input.select();
  }

  async #remove(conversation) {
    await this.#chat.remove(conversation);
    this.#onRemove(conversation);
  }
}

function ageOf(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  return time >= today - 7 * DAY ? "Last week" : "Older";
}
