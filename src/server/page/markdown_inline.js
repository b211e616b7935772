// The text inside a block of Markdown: emphasis, code, links and addresses. Images become links.
//
// The scanner writes a flat list of tokens, so that no nesting, however deep, can exhaust the stack.

import { el } from "./dom.js";
import { visibleText } from "./text.js";

const MAX_DEPTH = 16;
const MAX_BRACKETS = 200;
const MAX_LENGTH = 50_000;
const MAX_ADDRESS = 60;

const PLAIN = /[^\\`*_~[\]!<&\nh$]+/y;
const ANGLE_ADDRESS = /<(https?:\/\/[^\s<>]{1,2000})>/iy;
const BARE_ADDRESS = /https?:\/\/[^\s<>"`*]{1,2000}/iy;
const LINE_BREAK_TAG = /<br\s{0,3}\/?>/iy;
const ENTITY = /&(?:#(\d{1,7})|#x([\da-f]{1,6})|([a-z]{2,6}));/iy;
const DESTINATION = /\(\s{0,20}(?:<([^<>\n]{0,2000})>|([^\s()<>]{0,2000}(?:\([^\s()<>]{0,2000}\)[^\s()<>]{0,2000}){0,8}))/y;
const TITLE = /\s{1,20}(?:"[^"]{0,1000}"|'[^']{0,1000}')/y;
const DESTINATION_END = /\s{0,20}\)/y;
const ENTITIES = new Map(Object.entries({
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", deg: "°", times: "×", middot: "·",
  ndash: "–", mdash: "—", hellip: "…", larr: "←", rarr: "→", le: "≤", ge: "≥", ne: "≠",
}));

/** Appends the Markdown `source` of one block to the element `parent`. */
export function appendInline(parent, source) {
  if (source.length > MAX_LENGTH) {
    parent.append(visibleText(source));
    return;
  }
  emit(parent, new Scanner(source).scan());
}

/** Returns an http or https address as a URL without user name and password. Returns null for all other text. */
export function webAddress(text) {
  const url = URL.canParse(text) ? new URL(text) : null;
  if (!url || (url.protocol !== "https:" && url.protocol !== "http:")) return null;
  url.username = "";
  url.password = "";
  return url;
}

/** Splits `source` into tokens. */
class Scanner {
  #source;
  #at = 0;
  #text = "";
  #tokens = [];
  #brackets = [];
  #backticks = null;
  #missing = new Set();

  constructor(source) {
    this.#source = source;
  }

  scan() {
    while (this.#at < this.#source.length) {
      const plain = this.#match(PLAIN);
      if (plain) this.#text += plain[0];
      else this.#special(this.#source[this.#at]);
    }
    this.#flush();
    pairDelimiters(this.#tokens, 0);
    return this.#tokens;
  }

  #match(pattern) {
    pattern.lastIndex = this.#at;
    const match = pattern.exec(this.#source);
    if (match) this.#at += match[0].length;
    return match;
  }

  #flush() {
    if (this.#text) this.#tokens.push({ type: "text", text: this.#text });
    this.#text = "";
  }

  #push(token) {
    this.#flush();
    this.#tokens.push(token);
    return token;
  }

  #special(character) {
    switch (character) {
      case "\\": return this.#backslash();
      case "`": return this.#code();
      case "*":
      case "_":
      case "~": return this.#delimiter(character);
      case "[": return this.#openBracket(1);
      case "]": return this.#closeBracket();
      case "!": return this.#source[this.#at + 1] === "[" ? this.#openBracket(2) : this.#literal(1);
      case "<": return this.#angle();
      case "&": return this.#entity();
      case "\n": return this.#newline();
      case "h": return this.#bareAddress();
      default: return this.#source.startsWith("$$", this.#at) ? this.#math("$$") : this.#literal(1);
    }
  }

  #literal(length) {
    this.#text += this.#source.slice(this.#at, this.#at + length);
    this.#at += length;
  }

  #backslash() {
    const next = this.#source[this.#at + 1] ?? "";
    if (next === "(" && this.#math("\\)")) return;
    if (next === "[" && this.#math("\\]")) return;
    if (next === "\n") {
      this.#at += 2;
      this.#push({ type: "break" });
    } else if (/[!-/:-@[-`{-~]/.test(next)) {
      this.#at += 1;
      this.#literal(1);
    } else {
      this.#literal(1);
    }
  }

  /** Takes math verbatim, including underscores and backslashes. Returns false if `closing` does not follow. */
  #math(closing) {
    const end = this.#missing.has(closing) ? -1 : this.#source.indexOf(closing, this.#at + 2);
    if (end < 0) {
      this.#missing.add(closing);
      if (closing === "$$") this.#literal(2);
      return false;
    }
    this.#push({ type: "math", text: this.#source.slice(this.#at, end + 2) });
    this.#at = end + 2;
    return true;
  }

  #code() {
    this.#backticks ??= backtickRuns(this.#source);
    const length = runLength(this.#source, this.#at);
    const starts = this.#backticks.get(length);
    while (starts.length > 0 && starts.at(-1) <= this.#at) starts.pop();
    const end = starts.at(-1);
    if (end === undefined) {
      this.#literal(length);
      return;
    }
    let text = this.#source.slice(this.#at + length, end).replaceAll("\n", " ");
    if (text.startsWith(" ") && text.endsWith(" ") && text.trim()) text = text.slice(1, -1);
    this.#push({ type: "code", text });
    this.#at = end + length;
  }

  #delimiter(mark) {
    const length = runLength(this.#source, this.#at);
    if (mark === "~" && length !== 2) {
      this.#literal(length);
      return;
    }
    const before = previousCharacter(this.#source, this.#at);
    const after = String.fromCodePoint(this.#source.codePointAt(this.#at + length) ?? 0x20);
    const isLeft = !isSpace(after) && (!isPunctuation(after) || isSpace(before) || isPunctuation(before));
    const isRight = !isSpace(before) && (!isPunctuation(before) || isSpace(after) || isPunctuation(after));
    const isWord = mark === "_";
    const canOpen = isLeft && (!isWord || !isRight || isPunctuation(before));
    const canClose = isRight && (!isWord || !isLeft || isPunctuation(after));
    this.#push({ type: "delimiter", mark, length, total: length, canOpen, canClose, opens: [], closes: [] });
    this.#at += length;
  }

  #openBracket(length) {
    const token = this.#push({ type: "text", text: this.#source.slice(this.#at, this.#at + length) });
    if (this.#brackets.length === MAX_BRACKETS) this.#brackets.shift();
    this.#brackets.push({ token, index: this.#tokens.length - 1, isImage: length === 2 });
    this.#at += length;
  }

  #closeBracket() {
    const bracket = this.#brackets.pop();
    const start = this.#at;
    this.#at += 1;
    const destination = bracket ? this.#destination() : null;
    if (destination === null) {
      this.#at = start;
      this.#literal(1);
      return;
    }
    this.#flush();
    pairDelimiters(this.#tokens, bracket.index + 1);
    const type = bracket.isImage ? "image" : "link";
    Object.assign(bracket.token, { type: "open", element: type, address: destination });
    this.#tokens.push({ type: "close" });
    if (!bracket.isImage) this.#brackets = this.#brackets.filter((other) => other.isImage); // a link contains no link
  }

  /** Takes the `(address "title")` of a link. Returns the address, or null if the text has another form. */
  #destination() {
    const match = this.#match(DESTINATION);
    if (!match) return null;
    this.#match(TITLE);
    if (!this.#match(DESTINATION_END)) return null;
    return match[1] ?? match[2];
  }

  #angle() {
    if (this.#match(LINE_BREAK_TAG)) {
      this.#push({ type: "break" });
      return;
    }
    const match = this.#match(ANGLE_ADDRESS);
    if (match) this.#address(match[1]);
    else this.#literal(1);
  }

  #bareAddress() {
    const start = this.#at;
    const isWordStart = !/[\p{L}\p{N}_]/u.test(previousCharacter(this.#source, start));
    const match = isWordStart ? this.#match(BARE_ADDRESS) : null;
    const address = match ? trimAddress(match[0]) : "";
    this.#at = start;
    if (webAddress(address)) {
      this.#at += address.length;
      this.#address(address);
    } else {
      this.#literal(1);
    }
  }

  #address(address) {
    this.#push({ type: "open", element: "link", address });
    this.#tokens.push({ type: "text", text: address }, { type: "close" });
  }

  #entity() {
    const match = this.#match(ENTITY);
    const text = match && entityText(match);
    if (text) this.#text += text;
    else if (match) this.#text += match[0];
    else this.#literal(1);
  }

  #newline() {
    const isBreak = this.#text.endsWith("  ");
    this.#text = this.#text.trimEnd();
    this.#at += 1;
    this.#flush();
    if (isBreak) this.#tokens.push({ type: "break" });
    else this.#text = "\n";
  }
}

/** Returns a map from each length of a run of backticks to the positions of these runs, last first. */
function backtickRuns(source) {
  const runs = new Map();
  for (const match of source.matchAll(/`+/g)) {
    const length = match[0].length;
    if (!runs.has(length)) runs.set(length, []);
    runs.get(length).push(match.index);
  }
  for (const starts of runs.values()) starts.reverse();
  // The backticks after an escaped backtick can have a length that no whole run has.
  return { get: (length) => runs.get(length) ?? [] };
}

function runLength(source, at) {
  let end = at;
  while (source[end] === source[at]) end += 1;
  return end - at;
}

function previousCharacter(source, at) {
  if (at === 0) return " ";
  const isPair = at > 1 && (source.charCodeAt(at - 1) & 0xfc00) === 0xdc00;
  return source.slice(isPair ? at - 2 : at - 1, at);
}

function isSpace(character) {
  return /\s/u.test(character);
}

function isPunctuation(character) {
  return /[\p{P}\p{S}]/u.test(character);
}

/** Removes what belongs to the sentence around an address: final punctuation, and an unmatched closing parenthesis. */
function trimAddress(address) {
  let open = 0;
  for (const character of address) open += character === "(" ? 1 : character === ")" ? -1 : 0;
  let end = address.length;
  while (end > 0) {
    const last = address[end - 1];
    if (last === ")" && open < 0) open += 1;
    else if (!".,;:!?'_~]}|".includes(last)) break;
    end -= 1;
  }
  return address.slice(0, end);
}

function entityText([, decimal, hexadecimal, name]) {
  if (name) return ENTITIES.get(name) ?? "";
  const code = decimal ? Number(decimal) : Number.parseInt(hexadecimal, 16);
  const isCharacter = code > 0 && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
  return isCharacter ? String.fromCodePoint(code) : "\ufffd";
}

/** Finds the pairs among the delimiters from index `from` on, as CommonMark's "process emphasis" does. */
function pairDelimiters(tokens, from) {
  const open = [];
  const bottoms = new Map(); // for each kind of closer, the index in `open` below which no opener matches
  for (let at = from; at < tokens.length; at += 1) {
    const closer = tokens[at];
    if (closer.type !== "delimiter") continue;
    while (closer.canClose && closer.length > 0) {
      const kind = `${closer.mark}${closer.canOpen}${closer.total % 3}`;
      const bottom = bottoms.get(kind) ?? 0;
      let found = open.length - 1;
      while (found >= bottom && !isPair(open[found], closer)) found -= 1;
      if (found < bottom) {
        bottoms.set(kind, open.length);
        break;
      }
      const opener = open[found];
      open.length = opener.length > width(opener, closer) ? found + 1 : found;
      for (const [key, value] of bottoms) bottoms.set(key, Math.min(value, open.length));
      pair(opener, closer);
    }
    if (closer.canOpen && closer.length > 0) open.push(closer);
  }
  for (let at = from; at < tokens.length; at += 1) {
    if (tokens[at].type === "delimiter") tokens[at].type = "marks"; // must not pair with marks outside of the link
  }
}

function width(opener, closer) {
  return opener.length >= 2 && closer.length >= 2 ? 2 : 1;
}

function isPair(opener, closer) {
  if (opener.mark !== closer.mark) return false;
  const isAmbiguous = opener.canClose || closer.canOpen;
  return !isAmbiguous || (opener.total + closer.total) % 3 !== 0 || (opener.total % 3 === 0 && closer.total % 3 === 0);
}

function pair(opener, closer) {
  const length = width(opener, closer);
  const element = opener.mark === "~" ? "del" : length === 2 ? "strong" : "em";
  opener.length -= length;
  closer.length -= length;
  opener.opens.unshift(element);
  closer.closes.push(element);
}

/** Creates the nodes for the tokens. Beyond the maximum depth, adds only the text of elements. */
function emit(parent, tokens) {
  const stack = [parent];
  const finish = []; // one function for each open element
  const open = (element, address) => {
    const node = stack.length < MAX_DEPTH ? create(element, address) : null;
    finish.push(node && (element === "link" || element === "image") ? () => finishLink(node, address) : null);
    if (node) stack.at(-1).append(node);
    stack.push(node ?? stack.at(-1));
  };
  const close = () => {
    stack.pop();
    finish.pop()?.();
  };
  for (const token of tokens) {
    const top = stack.at(-1);
    switch (token.type) {
      case "text":
        top.append(visibleText(token.text));
        break;
      case "code":
        top.append(el("code", {}, visibleText(token.text)));
        break;
      case "math":
        top.append(el("code", { class: "math" }, visibleText(token.text)));
        break;
      case "break":
        top.append(el("br"));
        break;
      case "open":
        open(token.element, token.address);
        break;
      case "close":
        close();
        break;
      case "marks":
        token.closes.forEach(close);
        if (token.length > 0) stack.at(-1).append(token.mark.repeat(token.length));
        token.opens.forEach((element) => open(element));
        break;
    }
  }
}

function create(element, address) {
  if (element === "image") return el("span", { class: "image" }, "Image: ");
  if (element !== "link") return el(element);
  const url = webAddress(address);
  return url ? webLink(url) : el("span", { class: "unsafe-link" });
}

function webLink(url) {
  return el("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" });
}

/** Shows the real address after the text of a link, unless the text is the address. */
function finishLink(node, address) {
  const url = webAddress(address);
  if (node.classList.contains("image")) {
    if (!url) return;
    const link = webLink(url);
    link.append(shortAddress(url));
    node.append(" ", link);
  } else if (!url) {
    node.append(el("span", { class: "address" }, ` (${visibleText(address)})`));
  } else {
    if (!isAddressOf(node.textContent, url)) node.append(el("span", { class: "address" }, ` (${shortAddress(url)})`));
  }
}

/** Returns whether `text` is this address in ASCII. Other letters could look like ASCII and hide the real address. */
function isAddressOf(text, url) {
  return /^[!-~]+$/.test(text) && URL.canParse(text) && new URL(text).href === url.href;
}

function shortAddress(url) {
  const address = url.host + (url.pathname === "/" ? "" : url.pathname) + url.search + url.hash;
  return address.length > MAX_ADDRESS ? `${address.slice(0, MAX_ADDRESS)}…` : address;
}
