// The search with Ctrl+K: finds commands by name, and conversations by title or by a message of the shown branch.

import { pathTo } from "./conversation.js";
import { byId, el, icon } from "./dom.js";
import { visibleText } from "./text.js";

const MAX_RESULTS = 50;

/** The search dialog. */
export class Search {
  #list;
  #commands;
  #openConversation;
  #input = byId("search-input");
  #results = [];
  #selected = 0;

  /** Searches in the conversations of `list` and in `commands`, which are `[{ name, icon, run }]`. */
  constructor(list, commands, openConversation) {
    this.#list = list;
    this.#commands = commands;
    this.#openConversation = openConversation;
    this.#input.addEventListener("input", () => this.#show());
    this.#input.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "ArrowDown") this.#select(this.#selected + 1);
      else if (event.key === "ArrowUp") this.#select(this.#selected - 1);
      else if (event.key === "Enter") this.#run(this.#results[this.#selected]);
      else return;
      event.preventDefault();
    });
  }

  /** Opens the dialog. */
  open() {
    this.#input.value = "";
    byId("search").showModal();
    this.#show();
  }

  #show() {
    this.#results = this.#find(this.#input.value.trim().toLowerCase());
    const options = this.#results.map((result, index) => {
      return el("div", { role: "option", id: `result-${index}`, onclick: () => this.#run(result) },
        icon(result.icon), el("span", {}, result.name));
    });
    byId("search-results").replaceChildren(...(options.length > 0 ? options : [el("p", {}, "Nothing found")]));
    this.#select(0);
  }

  #select(index) {
    this.#selected = Math.max(0, Math.min(index, this.#results.length - 1));
    for (const option of byId("search-results").querySelectorAll("[role=option]")) {
      const isSelected = option.id === `result-${this.#selected}`;
      option.setAttribute("aria-selected", String(isSelected));
      if (isSelected) option.scrollIntoView({ block: "nearest" });
    }
    this.#input.setAttribute("aria-activedescendant", this.#results.length > 0 ? `result-${this.#selected}` : "");
  }

  #run(result) {
    if (!result) return;
    byId("search").close();
    result.run();
  }

  #find(query) {
    const commands = this.#commands.filter(({ name }) => name.toLowerCase().includes(query));
    const conversations = this.#list.all().filter((conversation) => {
      if (conversation.title.toLowerCase().includes(query)) return true;
      return pathTo(conversation).some(({ text }) => text.toLowerCase().includes(query));
    }).slice(0, MAX_RESULTS).map((conversation) => ({
      name: visibleText(conversation.title),
      icon: "chat",
      run: () => this.#openConversation(conversation),
    }));
    return query ? [...conversations, ...commands] : [...commands, ...conversations];
  }
}
