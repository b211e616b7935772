// A conversation is a tree: editing a message or asking for another answer adds a branch and keeps the old one.
//
// { id, title, created, updated, leaf, nodes: { ID: node } }, where `leaf` is the last message of the shown branch.
// A node is a message: { id, parent, role, created, text }. A user's node also has `files: [{ name, size, text }]`.
// A model's node also has `model`, `reasoning`, `thinkingSeconds`, `usage`, `firstTokenSeconds`, `seconds`, `finish` and
// `error: { title, message }`, each once it is known.

import { shorten } from "./text.js";

const TITLE_LENGTH = 60;
const FORMAT = "inferno-conversations";
const VERSION = 1;

/** Returns a random id. `crypto.randomUUID` does not exist over plain http from another machine. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Returns a conversation without messages. */
export function newConversation() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, leaf: null, nodes: {} };
}

/** Adds a node after the node `parent` (null for the first message) and shows its branch. Returns the node. */
export function addNode(conversation, parent, properties) {
  const node = { id: newId(), parent, created: Date.now(), ...properties };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  conversation.updated = node.created;
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node);
  return node;
}

function titleOf(node) {
  return shorten(node.text, TITLE_LENGTH) || node.files?.[0]?.name || "Untitled";
}

/** Returns the messages from the first message to the node `id`. By default, returns the shown branch. */
export function pathTo(conversation, id = conversation.leaf) {
  const path = [];
  for (let node = conversation.nodes[id]; node; node = conversation.nodes[node.parent]) path.push(node);
  return path.reverse();
}

/** Returns all versions of a message, including `node` itself, oldest first. */
export function siblings(conversation, node) {
  return children(conversation, node.parent);
}

function children(conversation, parent) {
  const nodes = Object.values(conversation.nodes).filter((node) => node.parent === parent);
  return nodes.sort((a, b) => a.created - b.created);
}

/** Shows the branch of `node`, down to its newest message. */
export function showBranch(conversation, node) {
  let leaf = node;
  for (let next = node; next; next = children(conversation, leaf.id).at(-1)) leaf = next;
  conversation.leaf = leaf.id;
}

/** Returns the messages of a request whose answer follows the node `id`, in the format of OpenAI's API. */
export function requestMessages(conversation, id, system) {
  const messages = pathTo(conversation, id).map((node) => ({ role: node.role, content: contentOf(node) }));
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

/** Returns the content of a message: each attached file as its name and a fenced block, then the text. */
export function contentOf(node) {
  const files = (node.files ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), (match) => match[0].length));
    const fence = "`".repeat(longest + 1);
    return `File: ${name}\n${fence}\n${text.replace(/\n$/, "")}\n${fence}\n\n`;
  });
  return files.join("") + node.text;
}

/** Returns conversations as the text of an export file. */
export function exportText(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 2);
}

/** Reads an export file. Throws an error if the text is not one. Copies known fields only, because files are untrusted. */
export function importText(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("it is not JSON");
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) throw new Error("it is not an export of this page");
  if (data.version !== VERSION) {
    throw new Error(`it has version ${Number(data.version)}, and this page reads version ${VERSION}`);
  }
  return data.conversations.map(importConversation);
}

function importConversation(data) {
  const conversation = newConversation();
  const ids = new Map(); // the id of a node in the file → its new id, because ids in a file are untrusted
  const entries = Object.values(data?.nodes ?? {}).filter((node) => node?.role === "user" || node?.role === "assistant");
  for (const node of entries) ids.set(String(node.id), newId());
  for (const node of entries) {
    const id = ids.get(String(node.id));
    conversation.nodes[id] = { id, parent: ids.get(String(node.parent)) ?? null, ...importMessage(node) };
  }
  if (hasCycle(conversation)) throw new Error("its messages refer to each other in a circle");
  conversation.title = shorten(string(data.title), TITLE_LENGTH) || "Untitled";
  conversation.created = number(data.created) ?? conversation.created;
  conversation.updated = number(data.updated) ?? conversation.updated;
  conversation.leaf = ids.get(String(data.leaf)) ?? Object.keys(conversation.nodes).at(-1) ?? null;
  return conversation;
}

function importMessage(node) {
  const message = { role: node.role, created: number(node.created) ?? Date.now(), text: string(node.text) };
  if (node.role === "user") {
    const files = Array.isArray(node.files) ? node.files : [];
    message.files = files.map((file) => {
      const text = string(file?.text);
      return { name: string(file?.name), size: text.length, text };
    });
    return message;
  }
  for (const name of ["model", "reasoning", "finish"]) {
    if (typeof node[name] === "string") message[name] = node[name];
  }
  for (const name of ["thinkingSeconds", "firstTokenSeconds", "seconds"]) message[name] = number(node[name]);
  if (node.usage) {
    message.usage = {
      prompt_tokens: number(node.usage.prompt_tokens) ?? 0,
      completion_tokens: number(node.usage.completion_tokens) ?? 0,
    };
  }
  if (node.error) message.error = { title: string(node.error.title), message: string(node.error.message) };
  return message;
}

function hasCycle(conversation) {
  const isRooted = new Set();
  for (const node of Object.values(conversation.nodes)) {
    const seen = new Set();
    for (let next = node; next && !isRooted.has(next.id); next = conversation.nodes[next.parent]) {
      if (seen.has(next.id)) return true;
      seen.add(next.id);
    }
    for (const id of seen) isRooted.add(id);
  }
  return false;
}

function string(value) {
  return typeof value === "string" ? value : "";
}

function number(value) {
  return Number.isFinite(value) ? value : undefined;
}
