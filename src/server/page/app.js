// Starts the page and connects its parts.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { ConversationList } from "./conversation_list.js";
import { pathTo } from "./conversation.js";
import { byId, el } from "./dom.js";
import { askForKey } from "./key.js";
import { MessagesView } from "./messages.js";
import { Search } from "./search.js";
import { ServerView } from "./server_view.js";
import { initSettings, openSettings } from "./settings.js";
import { ConversationStore, loadKey, loadSettings, saveSettings } from "./store.js";
import { formatCount, visibleText } from "./text.js";
import { showToast } from "./toast.js";

const RETRY_INTERVAL = 2000;
const IS_MAC = navigator.platform.startsWith("Mac");

const settings = loadSettings();
const store = new ConversationStore();
const api = new Api(loadKey, askForKey);
const chat = new Chat(api, store, settings);
const messages = new MessagesView(chat);
const server = new ServerView(api);
let models = [];
let connectTimer = null;

const list = new ConversationList(chat, store, (conversation) => {
  showToast(`Deleted “${visibleText(conversation.title)}”`, "Undo", () => chat.restore(conversation));
});

const composer = new Composer({
  send: (text, files) => chat.send(text, files),
  stop: () => chat.stop(),
  editLast: () => messages.editLast(),
  report: (message) => showToast(message),
});

const search = new Search(list, [
  { name: "New conversation", icon: "new", run: () => chat.open() },
  { name: "Settings", icon: "settings", run: openSettings },
  { name: "Live view of the server", icon: "pulse", run: () => server.toggle() },
], (conversation) => chat.open(conversation));

initSettings(settings, store, () => list.refresh());

chat.addEventListener("open", () => {
  const { id, title, leaf } = chat.conversation;
  history.replaceState(null, "", leaf ? `#${id}` : "#");
  document.title = title ? `${visibleText(title)} · inferno` : "inferno";
  setSidebar(false);
  if (matchMedia("(hover: hover)").matches) composer.focus(); // on a phone, focus would open the keyboard
  showContext();
});

chat.addEventListener("running", () => {
  composer.setRunning(Boolean(chat.runningNode));
  // The user may have entered the key for this answer. The list of models needs the same key.
  if (models.length === 0 && !chat.runningNode && chat.conversation.leaf) connect();
  if (document.activeElement === document.body && matchMedia("(hover: hover)").matches) composer.focus();
  showContext();
});

chat.addEventListener("saved", ({ detail: { conversation, error } }) => {
  if (error) showToast(`Cannot save this conversation: ${error.message}`);
  if (conversation === chat.conversation) {
    history.replaceState(null, "", `#${conversation.id}`);
    document.title = `${visibleText(conversation.title)} · inferno`;
  }
});

byId("new-chat").addEventListener("click", () => chat.open());
byId("open-search").addEventListener("click", () => search.open());
byId("open-settings").addEventListener("click", openSettings);
byId("open-sidebar").addEventListener("click", () => setSidebar(true));
byId("close-sidebar").addEventListener("click", () => setSidebar(false));
byId("search-key").textContent = IS_MAC ? "⌘ K" : "Ctrl K";
byId("model").addEventListener("change", ({ target }) => {
  settings.model = target.value;
  saveSettings(settings);
  showContext();
});

for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", ({ target }) => {
    if (target === dialog || target.closest("[data-close]")) dialog.close(); // a click on the backdrop has `dialog` as its target
  });
}

document.addEventListener("keydown", (event) => {
  const isCommand = IS_MAC ? event.metaKey : event.ctrlKey;
  if (isCommand && event.key.toLowerCase() === "k" && !event.shiftKey && !event.altKey) {
    event.preventDefault();
    if (byId("search").open) byId("search").close();
    else if (!document.querySelector("dialog[open]")) search.open();
  } else if (event.key === "Escape" && !event.isComposing && !document.querySelector("dialog[open]")) {
    if (document.body.classList.contains("sidebar-open")) setSidebar(false);
    else chat.stop();
  }
});

document.addEventListener("click", ({ target }) => {
  const isOutside = !target.closest("#sidebar, #open-sidebar");
  if (isOutside && document.body.classList.contains("sidebar-open")) setSidebar(false);
});

addEventListener("hashchange", () => openFromAddress());

start();

async function start() {
  composer.focus();
  connect();
  const isKept = await store.open(async () => {
    await list.refresh();
    const stored = list.find(chat.conversation.id);
    if (stored && stored.updated > chat.conversation.updated && !chat.runningNode) chat.open(stored);
  });
  if (!isKept) showToast("This browser does not allow the page to keep conversations. Conversations last until you close the page.");
  await list.refresh();
  if (!chat.conversation.leaf) openFromAddress(); // unless the user has already sent a message
}

/** Opens the conversation whose id is in the page's URL, or a new one. */
function openFromAddress() {
  const id = location.hash.slice(1);
  if (id !== chat.conversation.id || !id) chat.open(list.find(id));
}

/** Asks the server for its models. After an error, tries again later, or shows a button if the server needs a key. */
async function connect() {
  clearTimeout(connectTimer);
  try {
    models = await api.models();
    showModels();
    byId("connection").replaceChildren();
  } catch (error) {
    const isKeyMissing = error.status === 401;
    const retry = el("button", { type: "button", onclick: connect }, isKeyMissing ? "Enter the key" : "Try again");
    byId("connection").replaceChildren(error.title, ...(isKeyMissing ? [retry] : []));
    if (!isKeyMissing) connectTimer = setTimeout(connect, RETRY_INTERVAL);
  }
}

function showModels() {
  const select = byId("model");
  select.replaceChildren(...models.map(({ id }) => el("option", { value: id }, visibleText(id))));
  if (!models.some(({ id }) => id === settings.model)) settings.model = models[0]?.id ?? "";
  select.value = settings.model;
  select.disabled = models.length === 0;
  showContext();
}

/** Shows how much of the model's context the conversation has used. */
function showContext() {
  const usage = pathTo(chat.conversation).findLast((node) => node.usage)?.usage;
  const limit = models.find(({ id }) => id === settings.model)?.max_model_len;
  const used = usage ? usage.prompt_tokens + usage.completion_tokens : 0;
  byId("context").textContent = used && limit ? `${formatCount(used)} of ${formatCount(limit)} tokens of context used` : "";
}

/** Shows or hides the sidebar on a narrow screen. On a wide screen, the sidebar is always visible. */
function setSidebar(isOpen) {
  const wasOpen = document.body.classList.contains("sidebar-open");
  document.body.classList.toggle("sidebar-open", isOpen);
  if (isOpen) byId("close-sidebar").focus();
  else if (wasOpen) byId("open-sidebar").focus();
}
