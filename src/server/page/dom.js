// Helpers that create elements. No module of this page assigns HTML: text enters the document as text nodes only.

const SVG = "http://www.w3.org/2000/svg";

/**
 * Creates an element: `el("button", { class: "quiet", onclick: save }, "Save")`. A property whose name starts with "on"
 * is an event listener. All other properties are attributes, without those that are `false`, `null` or `undefined`.
 */
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** Creates an SVG element, with the same arguments as `el`. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Returns the element with this id, which index.html contains. */
export function byId(id) {
  return document.getElementById(id);
}

/** Creates an icon from the symbol `icon-NAME` of index.html. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));
}

/** Creates a button that shows only an icon; `label` is its name and its tooltip. */
export function iconButton(name, label, onclick) {
  return el("button", { type: "button", class: "icon-button", title: label, "aria-label": label, onclick }, icon(name));
}

/** Copies `text` to the clipboard. Resolves to whether the browser allowed the copy. */
export async function copyText(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  // Browsers offer `navigator.clipboard` only over HTTPS and on localhost.
  const area = el("textarea", { class: "visually-hidden" });
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied;
}

/** Creates a button that copies the text that `read` returns, and then shows a confirmation for a moment. */
export function copyButton(label, read) {
  const button = iconButton("copy", label, async () => {
    const isCopied = await copyText(read());
    button.replaceChildren(icon(isCopied ? "check" : "cross"));
    announce(isCopied ? "Copied" : "The browser did not allow the copy");
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  });
  return button;
}

/** Has a screen reader say `message`. */
export function announce(message) {
  byId("announcer").textContent = message;
}

/** Saves `text` as a file. */
export function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Makes a text area as high as its text, for browsers without `field-sizing: content`. Call it after each change. */
export function growWithText(area) {
  if (CSS.supports("field-sizing", "content")) return;
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}
