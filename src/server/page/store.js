// The data that the browser keeps: conversations in IndexedDB, settings in localStorage, and the key in sessionStorage
// or, if the user wants it remembered, in localStorage.

const DATABASE = "inferno";
const CONVERSATIONS = "conversations";
const SETTINGS = "inferno.settings";
const KEY = "inferno.key";

/** The conversations of this browser. Without IndexedDB, as in some private windows, they last until the page closes. */
export class ConversationStore {
  #opened;
  #database = new Promise((resolve) => {
    this.#opened = resolve;
  });
  #memory = new Map();
  #channel = new BroadcastChannel("inferno.conversations");

  /** Opens the database. `onChange` is called when another tab has changed a conversation. */
  async open(onChange) {
    this.#channel.onmessage = onChange;
    const database = await openDatabase().catch(() => null);
    this.#opened(database);
    return database !== null;
  }

  /** Returns all conversations, newest first. */
  async all() {
    const all = (await this.#run("readonly", (store) => store.getAll())) ?? [...this.#memory.values()];
    return all.sort((a, b) => b.updated - a.updated);
  }

  /** Writes one conversation. Fails if the disk is full. */
  async save(conversation) {
    this.#memory.set(conversation.id, conversation);
    await this.#run("readwrite", (store) => store.put(conversation));
    this.#channel.postMessage("changed");
  }

  /** Removes one conversation. */
  async remove(id) {
    this.#memory.delete(id);
    await this.#run("readwrite", (store) => store.delete(id));
    this.#channel.postMessage("changed");
  }

  /** Resolves to the result of an operation, or to undefined if there is no database. */
  async #run(mode, operation) {
    const database = await this.#database; // waits until the database is open
    if (!database) return undefined;
    return new Promise((resolve, reject) => {
      const transaction = database.transaction(CONVERSATIONS, mode);
      const request = operation(transaction.objectStore(CONVERSATIONS));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = () => reject(transaction.error);
    });
  }
}

function openDatabase() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(CONVERSATIONS, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

const DEFAULTS = {
  model: "", system: "", temperature: null, top_p: null, max_tokens: null, seed: null, reasoning_effort: "", theme: "",
};

/** Returns the saved settings; null and "" mean the default. */
export function loadSettings() {
  return { ...DEFAULTS, ...parseObject(localStorage.getItem(SETTINGS)) };
}

/** Saves the settings. */
export function saveSettings(settings) {
  localStorage.setItem(SETTINGS, JSON.stringify(settings));
}

function parseObject(text) {
  try {
    return JSON.parse(text) ?? {};
  } catch {
    return {};
  }
}

/** Returns the key for the server, or null. */
export function loadKey() {
  return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);
}

/** Saves the key until the tab closes or, if `isRemembered`, until the user deletes it. */
export function saveKey(key, isRemembered) {
  forgetKey();
  (isRemembered ? localStorage : sessionStorage).setItem(KEY, key);
}

/** Removes the key. */
export function forgetKey() {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
}
