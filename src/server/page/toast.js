// A message at the bottom of the page that disappears after a few seconds.

import { byId, el } from "./dom.js";

const TIME = 8000;

let timer = null;

/** Shows a message. If `label` is given, adds a button that calls `run`. */
export function showToast(message, label = null, run = null) {
  const toast = byId("toast");
  const hide = () => {
    toast.hidden = true;
  };
  const act = () => {
    hide();
    run();
  };
  toast.replaceChildren(message, ...(label ? [el("button", { type: "button", onclick: act }, label)] : []));
  toast.hidden = false;
  clearTimeout(timer);
  timer = setTimeout(hide, TIME);
}
