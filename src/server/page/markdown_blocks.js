// The block structure of Markdown: CommonMark with tables and task lists of GitHub, without HTML and link definitions.
//
// The parser reads line by line and never changes a block after a later one has started. MarkdownView relies on this.
// The text can be hostile, so every pattern here takes linear time.

const MAX_DEPTH = 12;
const MAX_COLUMNS = 64;

/**
 * Parses lines into blocks. Each block has a `type` and the index of its first `line`:
 * - `{ type: "code", language, text, isClosed }`
 * - `{ type: "math", text }`
 * - `{ type: "heading", level, text }`
 * - `{ type: "rule" }`
 * - `{ type: "quote", blocks }`
 * - `{ type: "list", start, isLoose, items: [{ checked, blocks }] }`: `start` is null if the list has bullets, and
 *   `checked` is null if the item is not a task
 * - `{ type: "table", alignments, header, rows }`
 * - `{ type: "paragraph", text }`
 */
export function parseBlocks(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, next] = parseBlock(lines, at, depth);
    block.line = at;
    blocks.push(block);
    at = next;
  }
  return blocks;
}

/** Returns the block that starts at line `at`, and the index of the line after it. */
function parseBlock(lines, at, depth) {
  if (depth >= MAX_DEPTH) {
    return [{ type: "paragraph", text: lines.slice(at).join("\n") }, lines.length];
  }
  const line = lines[at];
  if (indentation(line) >= 4) return parseIndentedCode(lines, at);
  const text = line.trim();
  const fence = openingFence(line);
  if (fence) return parseFence(lines, at, fence);
  if (isHeading(text)) return [parseHeading(text), at + 1];
  if (isRule(text)) return [{ type: "rule" }, at + 1];
  if (text.startsWith(">")) return parseQuote(lines, at, depth);
  const marker = listMarker(line);
  if (marker) return parseList(lines, at, marker, depth);
  if (isMathStart(text)) return parseMath(lines, at);
  if (isTableStart(lines, at)) return parseTable(lines, at);
  return parseParagraph(lines, at);
}

function isBlank(line) {
  return line.trim() === "";
}

/** Returns the number of columns of white space before the text. A tab ends at a multiple of four. */
function indentation(line) {
  let columns = 0;
  for (const character of line) {
    if (character === " ") columns += 1;
    else if (character === "\t") columns += 4 - (columns % 4);
    else break;
  }
  return columns;
}

/** Removes up to `count` columns of white space from the start of a line. */
function removeColumns(line, count) {
  let columns = 0;
  let at = 0;
  while (columns < count && (line[at] === " " || line[at] === "\t")) {
    columns += line[at] === " " ? 1 : 4 - (columns % 4);
    at += 1;
  }
  return " ".repeat(Math.max(0, columns - count)) + line.slice(at);
}

function parseIndentedCode(lines, at) {
  let end = at;
  for (let next = at; next < lines.length; next += 1) {
    if (isBlank(lines[next])) continue;
    if (indentation(lines[next]) < 4) break;
    end = next + 1;
  }
  const text = lines.slice(at, end).map((line) => removeColumns(line, 4)).join("\n");
  return [{ type: "code", language: "", text, isClosed: false }, end];
}

function openingFence(line) {
  const match = /^(`{3,}|~{3,})(.*)$/.exec(line.trim());
  if (!match || indentation(line) >= 4) return null;
  const [, marks, info] = match;
  if (marks[0] === "`" && info.includes("`")) return null;
  return { mark: marks[0], length: marks.length, language: info.trim().split(/[\s{]/, 1)[0], indent: indentation(line) };
}

function isClosingFence(line, fence) {
  const text = line.trim();
  if (text.length < fence.length || indentation(line) >= 4) return false;
  for (const character of text) {
    if (character !== fence.mark) return false;
  }
  return true;
}

function parseFence(lines, at, fence) {
  let end = at + 1;
  while (end < lines.length && !isClosingFence(lines[end], fence)) end += 1;
  const text = lines.slice(at + 1, end).map((line) => removeColumns(line, fence.indent)).join("\n");
  const isClosed = end < lines.length;
  return [{ type: "code", language: fence.language, text, isClosed }, isClosed ? end + 1 : end];
}

function isHeading(text) {
  return /^#{1,6}(?:[ \t]|$)/.test(text);
}

function parseHeading(text) {
  const level = /^#+/.exec(text)[0].length;
  const title = text.slice(level).trim();
  let end = title.length;
  while (end > 0 && title[end - 1] === "#") end -= 1;
  const hasClosingMarks = end === 0 || title[end - 1] === " " || title[end - 1] === "\t";
  return { type: "heading", level, text: hasClosingMarks ? title.slice(0, end).trimEnd() : title };
}

function isRule(text) {
  const mark = text[0];
  if (mark !== "-" && mark !== "*" && mark !== "_") return false;
  let count = 0;
  for (const character of text) {
    if (character === mark) count += 1;
    else if (character !== " " && character !== "\t") return false;
  }
  return count >= 3;
}

function isMathStart(text) {
  return text.startsWith("\\[") || text.startsWith("$$");
}

/** Parses display math up to its closing marks. Without these, the lines up to a blank line become a paragraph. */
function parseMath(lines, at) {
  const opening = lines[at].trim().slice(0, 2);
  const closing = opening === "$$" ? "$$" : "\\]";
  let end = at;
  while (end < lines.length && !isBlank(lines[end])) {
    const found = lines[end].indexOf(closing, end === at ? lines[end].indexOf(opening) + 2 : 0);
    end += 1;
    if (found >= 0 && isBlank(lines[end - 1].slice(found + 2))) {
      return [{ type: "math", text: lines.slice(at, end).join("\n").trim() }, end];
    }
  }
  return [{ type: "paragraph", text: paragraphText(lines, at, end) }, end];
}

/** Returns whether a line starts a block that ends the paragraph before it. */
function isInterruption(line) {
  if (indentation(line) >= 4) return false;
  const text = line.trim();
  if (text.startsWith(">") || isHeading(text) || isRule(text) || openingFence(line)) return true;
  const marker = listMarker(line);
  return marker !== null && !marker.isEmpty && (marker.start === null || marker.start === 1);
}

function parseQuote(lines, at, depth) {
  const inner = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    if (indentation(line) < 4 && line.trimStart().startsWith(">")) {
      inner.push(line.trimStart().slice(1).replace(/^ /, ""));
    } else {
      const follows = inner.length > 0 && isParagraphLine(inner.at(-1));
      if (isBlank(line) || !follows || isInterruption(line)) break;
      inner.push(line);
    }
    end += 1;
  }
  return [{ type: "quote", blocks: parseBlocks(inner, depth + 1) }, end];
}

/** Returns whether a line can be part of a paragraph that continues on the next line. */
function isParagraphLine(line) {
  return !isBlank(line) && !openingFence(line) && !isHeading(line.trim()) && !isRule(line.trim());
}

/** Parses the marker of a list item. `content` is the column where the text of the item starts. */
function listMarker(line) {
  const indent = indentation(line);
  if (indent >= 4) return null;
  const text = line.trimStart();
  const match = /^(?:[-+*]|(\d{1,9})[.)])(?=[ \t]|$)/.exec(text);
  if (!match || isRule(text.trimEnd())) return null;
  const width = match[0].length;
  const rest = text.slice(width);
  const isEmpty = isBlank(rest);
  const spaces = indentation(rest);
  return {
    indent,
    kind: match[0].at(-1),
    start: match[1] === undefined ? null : Number(match[1]),
    width,
    isEmpty,
    content: indent + width + (isEmpty || spaces > 4 ? 1 : spaces),
  };
}

function parseList(lines, at, first, depth) {
  const items = [];
  let isLoose = false;
  let end = at;
  for (let marker = first; marker && marker.kind === first.kind; ) {
    const [inner, itemEnd] = itemLines(lines, end, marker);
    const task = /^\[([ xX])\][ \t]/.exec(inner[0]);
    if (task) inner[0] = inner[0].slice(4);
    const blocks = parseBlocks(inner, depth + 1);
    items.push({ checked: task ? task[1] !== " " : null, blocks });
    isLoose ||= blocks.some((block) => block.line > 0 && block.type === "paragraph");
    let next = itemEnd;
    while (next < lines.length && isBlank(lines[next])) next += 1;
    marker = next < lines.length ? listMarker(lines[next]) : null;
    const isContinued = marker !== null && marker.kind === first.kind;
    isLoose ||= isContinued && next > itemEnd;
    end = isContinued ? next : itemEnd;
  }
  return [{ type: "list", start: first.start, isLoose, items }, end];
}

/** Returns the lines of one list item without their indentation, and the index of the line after the item. */
function itemLines(lines, at, marker) {
  const head = lines[at].trimStart().slice(marker.width);
  const inner = [removeColumns(head, marker.content - marker.indent - marker.width)];
  let fence = openingFence(inner[0]);
  let end = at + 1;
  for (let next = end; next < lines.length; next += 1) {
    const line = lines[next];
    if (isBlank(line)) {
      if (inner.length === 1 && isBlank(inner[0])) break; // an item can start with at most one blank line
      inner.push("");
      continue;
    }
    const indent = indentation(line);
    // Below `1.`, CommonMark requires a nested list to be indented by three columns, but models often use two.
    const isNested = indent >= marker.content || (indent >= marker.indent + 2 && !fence && listMarker(line) !== null);
    if (!isNested && (fence || !isParagraphLine(inner.at(-1)) || isInterruption(line) || listMarker(line))) break;
    const content = removeColumns(line, marker.content);
    if (fence) fence = isClosingFence(content, fence) ? null : fence;
    else fence = openingFence(content);
    inner.push(content);
    end = next + 1;
  }
  return [inner.slice(0, end - at), end];
}

/** Splits a row of a table into the text of its cells. */
function splitRow(line) {
  const text = line.trim();
  const cells = [];
  let cell = "";
  for (let at = text.startsWith("|") ? 1 : 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (text[at] === "|") {
      cells.push(cell.trim());
      cell = "";
    } else {
      cell += text[at];
    }
  }
  if (!isBlank(cell)) cells.push(cell.trim());
  return cells;
}

function isTableStart(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|")) return false;
  const delimiters = lines[at + 1];
  if (indentation(delimiters) >= 4 || !delimiters.includes("|") || !/^[|:\- \t]+$/.test(delimiters)) return false;
  const cells = splitRow(delimiters);
  if (cells.length > MAX_COLUMNS || !cells.every((cell) => /^:?-+:?$/.test(cell))) return false;
  return cells.length > 0 && splitRow(lines[at]).length === cells.length;
}

function parseTable(lines, at) {
  const alignments = splitRow(lines[at + 1]).map((cell) => {
    if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
    return "left";
  });
  const rows = [];
  let end = at + 2;
  while (end < lines.length && !isBlank(lines[end]) && !isInterruption(lines[end])) {
    rows.push(splitRow(lines[end]).slice(0, alignments.length));
    end += 1;
  }
  return [{ type: "table", alignments, header: splitRow(lines[at]), rows }, end];
}

function parseParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (indentation(line) < 4) {
      const underline = line.trim();
      if (/^(?:=+|-+)$/.test(underline)) {
        return [{ type: "heading", level: underline[0] === "=" ? 1 : 2, text: paragraphText(lines, at, end) }, end + 1];
      }
      if (isMathStart(underline) || isTableStart(lines, end)) break;
    }
    if (isBlank(line) || isInterruption(line)) break;
    end += 1;
  }
  return [{ type: "paragraph", text: paragraphText(lines, at, end) }, end];
}

function paragraphText(lines, at, end) {
  return lines.slice(at, end).map((line) => line.trimStart()).join("\n").trimEnd();
}
