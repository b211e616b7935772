// Asks the user for the API key if the server requires one.

import { byId } from "./dom.js";
import { loadKey, saveKey } from "./store.js";

let question = null; // the promise of the open dialog

/** Asks for a key. Resolves to whether there is a new key. `refused` is the key of the failed request, or null. */
export function askForKey(refused = null) {
  if (loadKey() !== refused) return Promise.resolve(true); // the user has entered a key since the request
  question ??= ask(refused).finally(() => {
    question = null;
  });
  return question;
}

function ask(refused) {
  const dialog = byId("key");
  const form = dialog.querySelector("form");
  const input = byId("key-input");
  byId("key-reason").textContent = refused === null
    ? "This server answers only requests that carry its key."
    : "The server refused this key.";
  input.value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    let isEntered = false;
    form.onsubmit = (event) => {
      event.preventDefault();
      saveKey(input.value.trim(), byId("key-remember").checked);
      isEntered = true;
      dialog.close();
    };
    dialog.onclose = () => resolve(isEntered);
  });
}
