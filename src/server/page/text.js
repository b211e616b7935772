// Text from a model or a file can be hostile: it can hide characters or reverse the order in which they appear.

const HIDDEN = [
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f]", // control characters, among them ESC
  "[\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]", // change the direction of the text
  "[\\u00ad\\u180e\\u200b\\u2060-\\u2065\\u206a-\\u206f\\ufeff\\ufff9-\\ufffb]", // invisible
  "[\\u{e0000}-\\u{e0fff}]", // invisible copies of ASCII, and supplementary variation selectors
].join("|");
const HIDDEN_CHARACTER = new RegExp(HIDDEN, "gu");
const LINE_SEPARATOR = /\r\n?|[\u2028\u2029]/g;

/**
 * Returns `text` without invisible characters, and with visible replacements for control characters other than tabs
 * and line breaks: "␛" for ESC, and `‹U+202E›` for bidirectional and C1 controls. Line breaks become "\n".
 */
export function visibleText(text) {
  return text.replace(LINE_SEPARATOR, "\n").replace(HIDDEN_CHARACTER, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code); // "␛" for ESC
    if (code === 0x7f) return "\u2421";
    if (code < 0xa0) return codePoint(code);
    const isBidi = code === 0x61c || (code >= 0x200e && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
    return isBidi ? codePoint(code) : "";
  });
}

function codePoint(code) {
  return `\u2039U+${code.toString(16).toUpperCase().padStart(4, "0")}\u203a`;
}

/** Returns `text` on one line with at most `limit` characters. */
export function shorten(text, limit) {
  const line = text.replace(/\s+/g, " ").trim();
  // A character has at most two UTF-16 code units, so these units contain the character after the limit, if it exists.
  const characters = [...line.slice(0, 2 * (limit + 1))];
  return characters.length > limit ? characters.slice(0, limit - 1).join("").trimEnd() + "…" : line;
}

const INTEGER = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Formats a count: 131072 becomes "131,072". */
export function formatCount(count) {
  return INTEGER.format(count);
}

/** Formats a rate or another positive number with at most two decimals: 0.42, 9.3, 148, 9,150. */
export function formatNumber(value) {
  if (value >= 100) return INTEGER.format(value);
  return value >= 10 ? value.toFixed(0) : value.toFixed(value >= 1 || value === 0 ? 1 : 2);
}

/** Formats a duration in seconds: "0.8 ms", "34 ms", "1.2 s", "2 min 5 s". */
export function formatSeconds(seconds) {
  if (seconds < 0.01) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  return `${Math.floor(whole / 60)} min ${whole % 60} s`;
}

/** Formats a duration without milliseconds: "0.2 s", "12.5 s", "2 min 5 s". */
export function formatDuration(seconds) {
  return seconds < 1 ? `${seconds.toFixed(1)} s` : formatSeconds(seconds);
}

/** Formats a size in bytes: "512 bytes", "3.4 KiB", "1.0 MiB". */
export function formatBytes(bytes) {
  if (bytes < 1024) return `${bytes} bytes`;
  if (bytes < 1024 * 1024) return `${(bytes / 1024).toFixed(1)} KiB`;
  return `${(bytes / 1024 / 1024).toFixed(1)} MiB`;
}
