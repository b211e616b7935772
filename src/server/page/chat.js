// The state of the chat: the open conversation, and the answers that are streaming. Contains no user interface.

import { addNode, newConversation, pathTo, requestMessages, showBranch, siblings } from "./conversation.js";

const SAVE_INTERVAL = 1000;

/**
 * The open conversation and the answers that are streaming. The events are:
 * - "open": another conversation is open
 * - "change": messages were added to the open conversation, or another branch is shown
 * - "progress": an answer grew or ended
 * - "running": an answer started or ended, or another conversation is open
 * - "saved": a conversation was saved, or saving failed; `detail` is `{ conversation, error }`
 * - "removed": a conversation was deleted; `detail` is the conversation
 */
export class Chat extends EventTarget {
  #api;
  #store;
  #settings;
  #running = new Map(); // the id of a conversation → { conversation, node, abort }
  #removed = new Set(); // the ids of deleted conversations, which an answer in progress must not save again

  /** Each request reads `settings` anew, because the settings dialog changes this object. */
  constructor(api, store, settings) {
    super();
    this.#api = api;
    this.#store = store;
    this.#settings = settings;
    this.conversation = newConversation();
  }

  /** Opens a conversation. Without an argument, starts a new one. */
  open(conversation = newConversation()) {
    this.conversation = this.#current(conversation);
    this.#emit("open");
    this.#emit("running");
  }

  /** Returns the node of the answer that is streaming in the open conversation, or undefined. */
  get runningNode() {
    return this.#running.get(this.conversation.id)?.node;
  }

  /** Returns whether an answer is streaming in the conversation with this id. */
  isRunning(id) {
    return this.#running.has(id);
  }

  /** Appends a message to the shown branch and asks the model for an answer. */
  send(text, files) {
    const user = addNode(this.conversation, this.conversation.leaf, { role: "user", text, files });
    return this.#answer(user);
  }

  /** Adds a new version of a user's message as a branch, and asks the model for an answer. */
  edit(node, text) {
    const user = addNode(this.conversation, node.parent, { role: "user", text, files: node.files });
    return this.#answer(user);
  }

  /** Asks for another answer to the same message. Removes the old one if it is last and empty because of an error. */
  regenerate(node) {
    const { conversation } = this;
    const isEmpty = node.error && !node.text && !node.reasoning;
    if (isEmpty && conversation.leaf === node.id) delete conversation.nodes[node.id];
    return this.#answer(conversation.nodes[node.parent]);
  }

  /** Shows another version of `node`: the next one if `step` is 1, the previous one if it is -1. */
  switchBranch(node, step) {
    const all = siblings(this.conversation, node);
    const next = all[all.indexOf(node) + step];
    if (!next) return;
    showBranch(this.conversation, next);
    this.#emit("change");
    this.#save(this.conversation);
  }

  /** Stops the answer in the conversation with this id, by default in the open conversation. */
  stop(id = this.conversation.id) {
    this.#running.get(id)?.abort.abort();
  }

  /** Returns the last message of the user in the shown branch, or undefined. */
  get lastUserNode() {
    return pathTo(this.conversation).findLast((node) => node.role === "user");
  }

  /** Gives a conversation another title. */
  rename(conversation, title) {
    const current = this.#current(conversation);
    current.title = title;
    return this.#save(current);
  }

  /** Deletes a conversation. */
  async remove(conversation) {
    this.stop(conversation.id);
    this.#removed.add(conversation.id);
    await this.#store.remove(conversation.id);
    if (conversation.id === this.conversation.id) this.open();
    this.#emit("removed", conversation);
  }

  /** Saves a deleted conversation again, to undo its deletion. */
  restore(conversation) {
    this.#removed.delete(conversation.id);
    return this.#save(conversation);
  }

  /** Returns the object in use for this conversation if it is open or being answered, and `conversation` otherwise. */
  #current(conversation) {
    if (conversation.id === this.conversation.id) return this.conversation;
    return this.#running.get(conversation.id)?.conversation ?? conversation;
  }

  async #answer(user) {
    const { conversation } = this;
    const abort = new AbortController();
    const node = addNode(conversation, user.id, { role: "assistant", text: "", reasoning: "" });
    this.#running.set(conversation.id, { conversation, node, abort });
    this.#emit("change");
    this.#emit("running");
    this.#save(conversation);
    let lastSave = Date.now();
    try {
      node.model = this.#settings.model || (await this.#api.models())[0].id; // the setting is empty before the page has a list of models
      const request = this.#request(node.model, requestMessages(conversation, user.id, this.#settings.system));
      const builder = new AnswerBuilder(node);
      for await (const chunk of this.#api.chat(request, abort.signal)) {
        builder.add(chunk);
        this.#emit("progress");
        if (Date.now() - lastSave > SAVE_INTERVAL) {
          lastSave = Date.now();
          this.#save(conversation);
        }
      }
    } catch (error) {
      if (abort.signal.aborted) node.finish = "stopped";
      else node.error = { title: error.title ?? "This page has a bug", message: error.message };
    }
    conversation.updated = Date.now();
    this.#running.delete(conversation.id);
    this.#emit("progress");
    this.#emit("running");
    await this.#save(conversation);
  }

  #request(model, messages) {
    const { temperature, top_p, max_tokens, seed, reasoning_effort } = this.#settings;
    const request = { model, messages, stream: true };
    request.stream_options = { include_usage: true, continuous_usage_stats: true };
    if (temperature !== null) request.temperature = temperature;
    if (top_p !== null) request.top_p = top_p;
    if (max_tokens !== null) request.max_completion_tokens = max_tokens;
    if (seed !== null) request.seed = seed;
    if (reasoning_effort) request.reasoning_effort = reasoning_effort;
    return request;
  }

  async #save(conversation) {
    if (this.#removed.has(conversation.id)) return;
    const error = await this.#store.save(conversation).then(() => null, (reason) => reason);
    this.#emit("saved", { conversation, error });
  }

  #emit(type, detail = null) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

/** Adds the chunks of a stream to the node of an answer, and measures when they arrive. */
class AnswerBuilder {
  #node;
  #start = performance.now();

  constructor(node) {
    this.#node = node;
  }

  add(chunk) {
    const node = this.#node;
    const delta = chunk.choices?.[0]?.delta;
    const seconds = (performance.now() - this.#start) / 1000;
    const hasText = Boolean(delta?.reasoning || delta?.content);
    if (hasText) {
      node.firstTokenSeconds ??= seconds;
      node.seconds = seconds;
    }
    if (delta?.reasoning) {
      node.reasoning += delta.reasoning;
      node.thinkingSeconds = seconds - node.firstTokenSeconds;
    }
    if (delta?.content) node.text += delta.content;
    node.finish = chunk.choices?.[0]?.finish_reason ?? node.finish;
    node.usage = chunk.usage ?? node.usage;
  }
}
