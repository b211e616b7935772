// Tests the page in a headless Chromium, against a mock server on 127.0.0.1.
//
//   node tests/page/run.mjs [--only WORD] [--pictures DIR]
//
// Needs Node 20 or later and Chromium; $CHROMIUM names the program. --only runs the tests whose name contains WORD.
// --pictures writes screenshots instead of running the tests; this takes a minute.

import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { Browser } from "./browser.mjs";
import { MockServer } from "./mock_server.mjs";
import { takePictures } from "./pictures.mjs";
import { HEAVY, HOSTILE } from "./samples.mjs";

const { values: options } = parseArgs({ options: { only: { type: "string" }, pictures: { type: "string" } } });
const scratch = mkdtempSync(join(tmpdir(), "page-files-"));
const tests = new Map();

function test(name, run) {
  tests.set(name, run);
}

/** Types a message into the focused box and sends it. */
async function send(page, text) {
  await page.evaluate(() => document.getElementById("prompt").focus());
  await page.type(text);
  await page.press("Enter");
}

/** Waits until `count` answers are shown and none of them streams. */
function answered(page, count) {
  return page.waitFor((wanted) => {
    const answers = document.querySelectorAll(".answer");
    return answers.length === wanted && !document.querySelector(".answer.running");
  }, count);
}

async function ask(page, text, count = 1) {
  await send(page, text);
  await answered(page, count);
}

/** Returns the text of each element that matches. */
function texts(page, selector) {
  return page.evaluate((wanted) => Array.from(document.querySelectorAll(wanted), (element) => element.innerText.trim()), selector);
}

/** Waits until the text of an element contains `text`. */
function sees(page, selector, text) {
  return page.waitFor((wanted, part) => {
    return [...document.querySelectorAll(wanted)].some((element) => element.checkVisibility() && element.textContent.includes(part));
  }, selector, text);
}

/** Waits until the browser has stored a conversation that contains `text`. */
function stored(page, text) {
  return page.waitFor(async (part) => {
    const { ConversationStore } = await import("./store.js");
    const store = new ConversationStore();
    await store.open(null);
    return JSON.stringify(await store.all()).includes(part);
  }, text);
}

function isHidden(page, selector) {
  return page.evaluate((wanted) => !document.querySelector(wanted)?.checkVisibility(), selector);
}

/** Renders Markdown on the page, in one step and again in pieces of `step` characters. Returns both results as HTML. */
function render(page, source, step) {
  return page.evaluate(async (text, size) => {
    const { MarkdownView } = await import("./markdown.js");
    const whole = document.createElement("div");
    new MarkdownView(whole).update(text, true);
    const grown = document.createElement("div");
    const view = new MarkdownView(grown);
    for (let end = size; end < text.length; end += size) view.update(text.slice(0, end), false);
    view.update(text, true);
    return [whole.innerHTML, grown.innerHTML];
  }, source, step);
}

/** Renders one block of Markdown without the attributes that every block has. */
async function html(page, source) {
  const [whole] = await render(page, source, 1e9);
  return whole.replace(/ (dir|target|rel)="[^"]*"/g, "");
}

test("a message streams an answer with thoughts and numbers", async ({ page, server }) => {
  await ask(page, "Explain how paged attention works.");
  assert.deepEqual(await texts(page, ".user .bubble"), ["Explain how paged attention works."]);
  await sees(page, ".answer .markdown strong", "Paged attention");
  await sees(page, ".answer .code", "fn slot(table: &[u32]");
  await sees(page, ".answer th", "waste per sequence");
  const [stats] = await texts(page, ".stats");
  assert.match(stats, /^\d+ tokens · \d+ tokens\/s · first token after \d+ ms · example\/model-20b$/);
  const [thoughts] = await texts(page, ".thoughts summary");
  assert.match(thoughts, /^Thought for \d/);
  assert.equal(await page.evaluate(() => document.querySelector(".thoughts").open), false);
  await page.click(".thoughts summary");
  await sees(page, ".thoughts-text", "The user asks how paged attention works.");
  assert.match((await texts(page, "#context"))[0], /^\d+ of 131,072 tokens of context used$/);
  const [request] = server.requests;
  assert.deepEqual(request, {
    model: "example/model-20b",
    messages: [{ role: "user", content: "Explain how paged attention works." }],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  });
});

test("an answer appears while it streams, and Escape stops it", async ({ page, server }) => {
  await send(page, "slow answer");
  await sees(page, ".thoughts.thinking summary", "Thinking");
  await sees(page, ".answer.running .markdown", "One word after");
  assert.equal(await page.evaluate(() => document.getElementById("messages").getAttribute("aria-busy")), "true");
  await page.press("Escape");
  await answered(page, 1);
  await sees(page, ".notice", "You stopped this answer.");
  await page.waitFor(() => document.querySelector(".answer .markdown").textContent.startsWith("One word after"));
  const end = Date.now() + 5000;
  while (server.canceled === 0 && Date.now() < end) await new Promise((resolve) => setTimeout(resolve, 20));
  assert.equal(server.canceled, 1);
});

test("the button stops an answer", async ({ page }) => {
  await send(page, "slow answer");
  await sees(page, ".answer.running .markdown", "One word");
  await page.click("#send");
  await sees(page, ".notice", "You stopped this answer.");
});

test("the next message sends the conversation, without the thoughts", async ({ page, server }) => {
  await ask(page, "hello there");
  await ask(page, "Draft something", 2);
  assert.deepEqual(server.requests[1].messages, [
    { role: "user", content: "hello there" },
    { role: "assistant", content: "You said: hello there" },
    { role: "user", content: "Draft something" },
  ]);
});

test("an edited message starts a branch, and the old one stays", async ({ page, server }) => {
  await ask(page, "first question");
  await ask(page, "second question", 2);
  await page.click(".user:first-child [aria-label='Edit message']");
  await page.evaluate(() => document.activeElement.select());
  await page.type("changed question");
  await page.press("Enter");
  await answered(page, 1);
  await sees(page, ".answer", "You said: changed question");
  assert.deepEqual(server.requests[2].messages, [{ role: "user", content: "changed question" }]);
  await sees(page, ".user .branches", "2 of 2");
  await page.click(".user [aria-label='Previous version']");
  await answered(page, 2);
  assert.deepEqual(await texts(page, ".user .bubble"), ["first question", "second question"]);
});

test("regenerate adds another answer", async ({ page, server }) => {
  await ask(page, "a question");
  await page.click("[aria-label='Answer again']");
  await sees(page, ".answer .branches", "2 of 2");
  assert.equal(server.requests.length, 2);
  assert.deepEqual(server.requests[1].messages, server.requests[0].messages);
  await page.click(".answer [aria-label='Previous version']");
  await sees(page, ".answer .branches", "1 of 2");
});

test("a reload keeps conversations and their branches", async ({ page }) => {
  await ask(page, "remember this");
  await page.click("[aria-label='Answer again']");
  await sees(page, ".answer .branches", "2 of 2");
  await page.reload();
  await answered(page, 1);
  assert.deepEqual(await texts(page, ".user .bubble"), ["remember this"]);
  await sees(page, ".answer", "You said: remember this");
  await sees(page, ".answer .branches", "2 of 2");
  await sees(page, "#conversations .title", "remember this");
});

test("a reload during an answer keeps the part that arrived", async ({ page }) => {
  await send(page, "slow answer");
  await stored(page, "One word after another");
  await page.reload();
  await answered(page, 1);
  await sees(page, ".answer .markdown", "One word after another");
  await sees(page, ".notice", "The page closed before this answer was complete.");
});

test("conversations can be renamed, deleted, restored and opened", async ({ page }) => {
  await ask(page, "the first one");
  await page.click("#new-chat");
  await page.waitFor(() => document.getElementById("welcome").checkVisibility());
  await ask(page, "the second one");
  assert.deepEqual(await texts(page, "#conversations button.title"), ["the second one", "the first one"]);
  await page.evaluate(() => document.querySelectorAll("#conversations button.title")[1].focus());
  await page.press("F2");
  await page.type("a better name");
  await page.press("Enter");
  await sees(page, "#conversations button.title", "a better name");
  await page.evaluate(() => document.querySelector("#conversations button.title").focus());
  await page.press("Delete");
  await page.waitFor(() => document.querySelectorAll("#conversations li").length === 1);
  await sees(page, "#toast", "Deleted “the second one”");
  await page.click("#toast button");
  await page.waitFor(() => document.querySelectorAll("#conversations li").length === 2);
  await page.click("#conversations li:last-child button.title");
  await sees(page, ".user .bubble", "the first one");
  await page.reload();
  await sees(page, ".user .bubble", "the first one");
  await sees(page, "#conversations button.title", "a better name");
});

test("another tab shows what this one saved", async ({ page, server }) => {
  const other = await page.sibling();
  await other.goto(server.url);
  await ask(page, "from the first tab");
  await sees(other, "#conversations button.title", "from the first tab");
});

test("an export can be imported, and other files are refused", async ({ page }) => {
  await ask(page, "Draft an export");
  const text = await page.evaluate(async () => {
    const { exportText } = await import("./conversation.js");
    const { ConversationStore } = await import("./store.js");
    const store = new ConversationStore();
    await store.open(() => {});
    return exportText(await store.all());
  });
  const file = join(scratch, "export.json");
  writeFileSync(file, text);
  await page.click("#open-settings");
  await page.chooseFiles("#import-input", [file]);
  await sees(page, "#transfer", "Imported 1 conversation.");
  assert.equal((await texts(page, "#conversations li")).length, 2);
  writeFileSync(file, JSON.stringify({ nodes: "x" }));
  await page.chooseFiles("#import-input", [file]);
  await sees(page, "#transfer", "Cannot import export.json: it is not an export of this page.");
  const circle = { a: { id: "a", parent: "b", role: "user" }, b: { id: "b", parent: "a", role: "assistant" } };
  writeFileSync(file, JSON.stringify({ format: "inferno-conversations", version: 1, conversations: [{ nodes: circle }] }));
  await page.chooseFiles("#import-input", [file]);
  await sees(page, "#transfer", "refer to each other in a circle");
});

test("the settings go into the request and survive a reload", async ({ page, server }) => {
  await page.click("#open-settings");
  for (const [name, value] of [["system", "Be brief."], ["temperature", "0.7"], ["top_p", "0.9"], ["max_tokens", "256"], ["seed", "7"]]) {
    await page.evaluate((field) => document.querySelector(`#settings [name=${field}]`).focus(), name);
    await page.type(value);
  }
  await page.evaluate(() => {
    const select = document.querySelector("#settings [name=reasoning_effort]");
    select.value = "low";
    select.dispatchEvent(new Event("input", { bubbles: true }));
  });
  await page.press("Escape");
  await page.reload();
  await ask(page, "hello");
  const { messages, temperature, top_p, max_completion_tokens, seed, reasoning_effort } = server.requests[0];
  assert.deepEqual(messages[0], { role: "system", content: "Be brief." });
  assert.deepEqual({ temperature, top_p, max_completion_tokens, seed, reasoning_effort },
    { temperature: 0.7, top_p: 0.9, max_completion_tokens: 256, seed: 7, reasoning_effort: "low" });
});

test("the chosen model is used", async ({ page, server }) => {
  await page.evaluate(() => {
    const select = document.getElementById("model");
    select.value = "example/model-8b";
    select.dispatchEvent(new Event("change"));
  });
  await ask(page, "hello");
  assert.equal(server.requests[0].model, "example/model-8b");
  await sees(page, "#context", "of 8,192 tokens");
});

test("text files go before the message in a fenced block", async ({ page, server }) => {
  const file = join(scratch, "notes.md");
  writeFileSync(file, "a fence:\n```\ncode\n```\n");
  await page.chooseFiles("#file-input", [file]);
  await sees(page, "#files li", "notes.md, 22 bytes");
  await ask(page, "Summarize this.");
  assert.equal(server.requests[0].messages[0].content,
    "File: notes.md\n````\na fence:\n```\ncode\n```\n````\n\nSummarize this.");
  await sees(page, ".user .file summary", "notes.md");
  assert.equal((await texts(page, "#files li")).length, 0);
});

test("files that are too large or not text are refused", async ({ page }) => {
  const large = join(scratch, "large.txt");
  writeFileSync(large, "x".repeat(1024 * 1024 + 1));
  await page.chooseFiles("#file-input", [large]);
  await sees(page, "#toast", "Cannot attach large.txt");
  const binary = join(scratch, "binary.bin");
  writeFileSync(binary, Buffer.from([0xff, 0xfe, 0x00, 0x80]));
  await page.chooseFiles("#file-input", [binary]);
  await sees(page, "#toast", "Cannot attach binary.bin: it is not UTF-8 text.");
  assert.equal((await texts(page, "#files li")).length, 0);
});

test("the page asks for the key, again if it is wrong, and keeps it for the tab", async ({ page, server }) => {
  server.key = "right";
  await page.send("Page.navigate", { url: server.url });
  await sees(page, "#key-reason", "This server answers only requests that carry its key.");
  await page.type("wrong");
  await page.press("Enter");
  await sees(page, "#key-reason", "The server refused this key.");
  await page.type("right");
  await page.press("Enter");
  await page.ready();
  await ask(page, "hello");
  assert.deepEqual(await page.evaluate(() => [sessionStorage["inferno.key"], localStorage["inferno.key"]]), ["right", null]);
  server.key = "changed";
  await send(page, "hello again");
  await sees(page, "#key-reason", "The server refused this key.");
  await page.type("changed");
  await page.click("#key-remember");
  await page.evaluate(() => document.querySelector("#key form").requestSubmit());
  await answered(page, 2);
  assert.deepEqual(await page.evaluate(() => [sessionStorage["inferno.key"], localStorage["inferno.key"]]), [null, "changed"]);
  page.problems = page.problems.filter((problem) => !problem.includes("401"));
});

test("without the key the page says so and offers to enter it", async ({ page, server }) => {
  server.key = "right";
  await page.send("Page.navigate", { url: server.url });
  await sees(page, "#key-reason", "key");
  await page.press("Escape");
  await sees(page, "#connection", "The server needs a key");
  await page.click("#connection button");
  await sees(page, "#key-reason", "key");
  await page.type("right");
  await page.press("Enter");
  await page.ready();
  await page.waitFor(() => document.getElementById("connection").textContent === "");
  page.problems = page.problems.filter((problem) => !problem.includes("401"));
});

test("an error is shown in words and can be retried", async ({ page, server }) => {
  await send(page, "busy server");
  await sees(page, ".error", "The server is busy");
  await sees(page, ".error", "32 requests are waiting. Try again in 2 s.");
  await page.click(".error button");
  await sees(page, ".answer .markdown", "You said: busy server");
  assert.equal((await texts(page, ".answer")).length, 1);
  assert.equal((await texts(page, ".branches")).length, 0);
  assert.equal(server.requests.length, 2);
  page.problems = page.problems.filter((problem) => !problem.includes("429"));
});

test("a fault and a lost connection keep the part that arrived", async ({ page }) => {
  await ask(page, "fault please");
  await sees(page, ".answer .markdown", "This answer ends");
  await sees(page, ".error", "The server stopped the answer The GPU reported an error.");
  await page.click("#new-chat");
  await ask(page, "cut please");
  await sees(page, ".answer .markdown", "This answer ends");
  await sees(page, ".error", "The connection was lost");
  page.problems = page.problems.filter((problem) => !problem.includes("ERR_"));
});

test("a server that is away is reported, and found when it returns", async ({ page, server }) => {
  const port = Number(new URL(server.url).port);
  await server.close();
  await ask(page, "is anyone there");
  await sees(page, ".error", "Cannot reach the server");
  const again = await new MockServer().listen(port);
  await page.click(".error button");
  await sees(page, ".answer .markdown", "You said: is anyone there");
  await again.close();
  page.problems = page.problems.filter((problem) => !problem.includes("ERR_"));
});

test("an answer goes on while another conversation is open", async ({ page }) => {
  await send(page, "slow answer");
  await sees(page, ".answer.running .markdown", "One word");
  await page.click("#new-chat");
  await ask(page, "meanwhile");
  await sees(page, "#conversations .dot", "");
  await page.click("#conversations li:has(.dot) button.title");
  await sees(page, ".answer.running .markdown", "One word after another, One word");
  await page.press("Escape");
  await answered(page, 1);
});

test("Markdown becomes elements", async ({ page }) => {
  const cases = [
    ["# T #", '<h3 class="level-1">T</h3>'],
    ["Title\n---", '<h4 class="level-2">Title</h4>'],
    ["a *b* **c** ***d*** ~~e~~ `f`", "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <del>e</del> <code>f</code></p>"],
    ["snake_case_name 2*3*4", "<p>snake_case_name 2<em>3</em>4</p>"],
    ["**a*", "<p>*<em>a</em></p>"],
    ["`` a`b ``", "<p><code>a`b</code></p>"],
    ["a  \nb\\\nc<br>d\ne", "<p>a<br>b<br>c<br>d\ne</p>"],
    ["\\*a\\* &amp; &lt; &bogus; &#65;", "<p>*a* &amp; &lt; &amp;bogus; A</p>"],
    ["- a\n- b\n  - c", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"],
    ["1. a\n  - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"],
    ["3. a\n\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'],
    ["> a\nb\n> > c", "<blockquote><p>a\nb</p><blockquote><p>c</p></blockquote></blockquote>"],
    ["---", "<hr>"],
    ["a\n***\nb", "<p>a</p><hr><p>b</p>"],
    ["$$\na_1 * b_1\n$$", '<pre class="math" tabindex="0">$$\na_1 * b_1\n$$</pre>'],
    ["\\(a_1\\) and \\[b_1\\]", '<p><code class="math">\\(a_1\\)</code> and <code class="math">\\[b_1\\]</code></p>'],
    ["[a](https://a.test/)", '<p><a href="https://a.test/" title="https://a.test/">a<span class="address"> (a.test)</span></a></p>'],
    ["https://a.test/b_c.", '<p><a href="https://a.test/b_c" title="https://a.test/b_c">https://a.test/b_c</a>.</p>'],
    ["[a](javascript:1)", '<p><span class="unsafe-link">a<span class="address"> (javascript:1)</span></span></p>'],
    ["![a](https://a.test/b.png)", '<p><span class="image">Image: a <a href="https://a.test/b.png" title="https://a.test/b.png">a.test/b.png</a></span></p>'],
    ["[a [b](https://b.test/c)](https://a.test/)", '<p>[a <a href="https://b.test/c" title="https://b.test/c">b<span class="address"> (b.test/c)</span></a>](<a href="https://a.test/" title="https://a.test/">https://a.test/</a>)</p>'],
    ["<b>x</b>", "<p>&lt;b&gt;x&lt;/b&gt;</p>"],
  ];
  for (const [source, expected] of cases) assert.equal(await html(page, source), expected, source);
  const table = await html(page, "| a | b |\n|---|:-:|\n| 1 | `x\\|y` |\nafter\n\nend");
  assert.match(table, /<th class="align-center" scope="col">b<\/th>.*<td class="align-center"><code>x\|y<\/code><\/td>.*<td class="align-left">after<\/td>.*<p>end<\/p>$/);
  assert.match(await html(page, "- [x] a\n- [ ] b"), /<li class="task"><input type="checkbox" disabled="" checked="" aria-label="Done"> a<\/li>/);
});

test("Markdown that arrives in pieces looks like Markdown that arrives at once", async ({ page }) => {
  const { ANSWERS } = await import("./samples.mjs");
  for (const source of [ANSWERS.markdown.text, ANSWERS.Explain.text, HOSTILE, "a\r\n\r\n```x\r\ncode\r\n```\r\n- b\r\n"]) {
    for (const step of [1, 2, 7, 40]) {
      const [whole, grown] = await render(page, source, step);
      assert.equal(grown, whole, `in pieces of ${step}`);
    }
  }
});

test("hostile output runs nothing, loads nothing and hides nothing", async ({ page, server }) => {
  await ask(page, "hostile");
  const found = await page.evaluate(() => {
    const answer = document.querySelector(".answer .markdown");
    return {
      hacked: window.hacked === undefined ? null : window.hacked,
      tags: [...new Set(Array.from(answer.querySelectorAll("*"), (element) => element.tagName.toLowerCase()))].sort(),
      handlers: [...answer.querySelectorAll("*")].flatMap((element) => element.getAttributeNames().filter((name) => name.startsWith("on"))),
      links: Array.from(answer.querySelectorAll("a"), ({ protocol, rel, target, href, textContent }) => ({ protocol, rel, target, href, textContent })),
      text: answer.textContent,
    };
  });
  assert.equal(found.hacked, null);
  assert.deepEqual(found.tags.filter((tag) => !["a", "span", "p", "div", "pre", "code", "button", "svg", "use", "table", "thead", "tbody", "tr", "th", "td"].includes(tag)), []);
  assert.deepEqual(found.handlers, []);
  for (const { protocol, rel, target, href } of found.links) {
    assert.match(protocol, /^https?:$/, href);
    assert.equal(rel, "noopener noreferrer");
    assert.equal(target, "_blank");
  }
  const shown = found.links.map(({ textContent }) => textContent);
  assert.ok(shown.includes("bank (evil.test/login)"), shown);
  assert.ok(shown.some((text) => text.startsWith("https://bank.test@evil.test/ (evil.test)")), shown);
  assert.ok(shown.some((text) => text.startsWith("homograph (xn--")), shown);
  assert.doesNotMatch(found.text, /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069\u200b\u00ad]/u);
  assert.doesNotMatch(found.text, /[\u{e0000}-\u{e007f}]/u);
  assert.match(found.text, /␛\[31mred/);
  assert.match(found.text, /‹U\+202E›gnp\.exe/);
  assert.deepEqual(page.requests.filter((url) => !url.startsWith(server.url) && !url.startsWith("data:image/svg+xml,%3Csvg")), []);
});

test("the tests notice what the policy blocks", async ({ page, server }) => {
  await page.evaluate(() => {
    const image = document.createElement("img");
    image.src = "http://probe.test/pixel.png";
    document.body.append(image);
  });
  const isRefused = await page.evaluate(() => {
    try {
      document.body.innerHTML = "<p>text</p>";
    } catch (error) {
      return error instanceof TypeError;
    }
    return false;
  });
  assert.ok(isRefused, "Trusted Types refuse HTML");
  const end = Date.now() + 5000;
  while (server.violations.length < 2 && Date.now() < end) await new Promise((resolve) => setTimeout(resolve, 20));
  assert.match(server.violations.join("\n"), /img-src/);
  assert.match(server.violations.join("\n"), /trusted-types/);
  assert.ok(page.problems.some((problem) => problem.includes("probe.test")), page.problems);
  server.violations = [];
  page.problems = [];
});

test("hostile titles, models and file names stay text", async ({ page }) => {
  await ask(page, "<img src=x onerror=window.hacked=1> \u202egnp");
  await sees(page, "#conversations .title", "<img src=x onerror=window.hacked=1> ‹U+202E›gnp");
  assert.equal(await page.evaluate(() => document.title), "<img src=x onerror=window.hacked=1> ‹U+202E›gnp · inferno");
  assert.equal(await page.evaluate(() => window.hacked === undefined), true);
});

test("text that is hard to parse does not freeze the page", async ({ page }) => {
  for (const [name, source] of Object.entries(HEAVY)) {
    const { milliseconds, depth } = await page.evaluate(async (text) => {
      const { MarkdownView } = await import("./markdown.js");
      const body = document.createElement("div");
      document.getElementById("messages").append(body);
      const start = performance.now();
      const view = new MarkdownView(body);
      for (let part = 1; part <= 10; part += 1) view.update(text.slice(0, (text.length * part) / 10), part === 10);
      body.getBoundingClientRect();
      const time = performance.now() - start;
      const depthOf = (element) => 1 + Math.max(0, ...Array.from(element.children).slice(0, 50).map(depthOf));
      const result = { milliseconds: Math.round(time), depth: depthOf(body) };
      body.remove();
      return result;
    }, source);
    if (process.env.VERBOSE) console.log(`     ${name}: ${milliseconds} ms, depth ${depth}`);
    assert.ok(milliseconds < 6000, `${name} took ${milliseconds} ms`); // a hang takes minutes
    assert.ok(depth < 80, `${name} has depth ${depth}`);
  }
});

test("a code block of 100,000 characters streams", async ({ page, server }) => {
  server.delay = 0;
  await ask(page, "code");
  const length = await page.evaluate(() => document.querySelector(".answer pre").innerText.length);
  assert.ok(length > 100_000, String(length));
});

test("the page can be used with the keyboard alone", async ({ page, server }) => {
  await page.waitFor(() => document.activeElement.id === "prompt");
  await page.type("first line");
  await page.press("Shift+Enter");
  await page.type("second line");
  await page.press("Enter");
  await answered(page, 1);
  assert.equal(server.requests[0].messages[0].content, "first line\nsecond line");
  await page.press("ArrowUp");
  assert.equal(await page.evaluate(() => document.activeElement.value), "first line\nsecond line");
  await page.press("Escape");
  assert.equal(await page.evaluate(() => document.activeElement.id), "prompt");
  await page.press("Control+k");
  await sees(page, "#search [role=option]", "New conversation");
  await page.type("new conv");
  await page.press("Enter");
  await page.waitFor(() => document.getElementById("welcome").checkVisibility());
  assert.equal(await page.evaluate(() => document.activeElement.id), "prompt");
  await page.press("Control+k");
  await page.type("second line");
  await sees(page, "#search [role=option][aria-selected=true]", "first line second line");
  await page.press("Enter");
  await sees(page, ".user .bubble", "first line");
  await page.press("Control+k");
  await page.press("Escape");
  assert.equal(await isHidden(page, "#search"), true);
  const seen = new Set();
  for (let count = 0; count < 25; count += 1) {
    await page.press("Tab");
    seen.add(await page.evaluate(() => document.activeElement.getAttribute("aria-label") ?? document.activeElement.id));
  }
  for (const name of ["Copy answer", "Answer again", "Edit message", "Live view of the server", "open-settings", "new-chat", "prompt"]) {
    assert.ok(seen.has(name), `${name} is not among ${[...seen]}`);
  }
});

test("every control has a name, and ids are unique", async ({ page }) => {
  await ask(page, "Explain how paged attention works.");
  await page.click("#toggle-server");
  const { nameless, twice } = await page.evaluate(() => {
    const controls = [...document.querySelectorAll("button, input:not([hidden]), select, textarea, [tabindex]")];
    const ids = Array.from(document.querySelectorAll("[id]"), ({ id }) => id);
    return {
      nameless: controls.filter((control) => !control.ariaLabel && !control.labels?.length && !control.textContent.trim()).map(({ outerHTML }) => outerHTML),
      twice: ids.filter((id, index) => ids.indexOf(id) !== index),
    };
  });
  assert.deepEqual(nameless, []);
  assert.deepEqual(twice, []);
});

test("a phone shows everything without horizontal scrolling", async ({ page }) => {
  await page.resize(360, 740, { isPhone: true, scale: 2 });
  await page.waitFor(() => !document.getElementById("sidebar").checkVisibility({ visibilityProperty: true }));
  const overflow = () => page.evaluate(() => {
    const { scrollWidth, clientWidth } = document.documentElement;
    const scroller = document.getElementById("scroller");
    return [scrollWidth - clientWidth, scroller.scrollWidth - scroller.clientWidth, document.getElementById("server").scrollWidth - innerWidth];
  });
  for (const text of ["Explain how paged attention works.", "markdown", "hostile", "x".repeat(500)]) {
    await page.click("#prompt");
    await page.type(text);
    await page.press("Enter");
    await page.waitFor(() => document.querySelector(".answer") && !document.querySelector(".answer.running"));
    const [window, messages] = await overflow();
    assert.deepEqual([window, messages], [0, 0], text.slice(0, 20));
  }
  await page.click("#open-sidebar");
  await page.waitFor(() => document.getElementById("sidebar").getBoundingClientRect().x === 0);
  await page.click("#open-settings");
  await page.waitFor(() => document.getElementById("settings").open);
  assert.equal(await page.evaluate(() => document.getElementById("settings").scrollWidth <= innerWidth), true);
  await page.press("Escape");
  await page.press("Escape");
  await page.waitFor(() => !document.getElementById("sidebar").checkVisibility({ visibilityProperty: true }));
  await page.click("#toggle-server");
  await sees(page, "#server .figure", "tokens/s");
  assert.ok((await overflow()).every((pixels) => pixels <= 0));
  const small = await page.evaluate(() => [...document.querySelectorAll("main button, main select")].filter((button) => {
    const { width, height } = button.getBoundingClientRect();
    return button.checkVisibility() && !button.closest(".code, .actions") && (width < 36 || height < 36);
  }).map(({ outerHTML }) => outerHTML));
  assert.deepEqual(small, []);
});

test("light and dark follow the system, and the setting overrides it", async ({ page }) => {
  await ask(page, "Explain how paged attention works.");
  const background = () => page.evaluate(() => getComputedStyle(document.documentElement).backgroundColor);
  await page.emulate({ "prefers-color-scheme": "light" });
  const light = await background();
  const contrasts = () => page.evaluate(() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const luminance = (color) => {
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
      const [red, green, blue] = Array.from(canvas.getImageData(0, 0, 1, 1).data.slice(0, 3), (value) => {
        const share = value / 255;
        return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
      });
      return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const backgroundOf = (element) => {
      const color = getComputedStyle(element).backgroundColor;
      return color === "rgba(0, 0, 0, 0)" && element.parentElement ? backgroundOf(element.parentElement) : color;
    };
    const elements = [...document.querySelectorAll("body *")].filter((element) => {
      const hasText = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
      return hasText && element.checkVisibility({ opacityProperty: true }) && !element.disabled;
    });
    return elements.map((element) => {
      const [a, b] = [luminance(getComputedStyle(element).color), luminance(backgroundOf(element))].sort((x, y) => y - x);
      return { ratio: (a + 0.05) / (b + 0.05), text: `${element.tagName} ${element.textContent.slice(0, 30)}` };
    }).filter(({ ratio }) => ratio < 4.5);
  });
  assert.deepEqual(await contrasts(), []);
  await page.emulate({ "prefers-color-scheme": "dark" });
  const dark = await background();
  assert.notEqual(light, dark);
  assert.deepEqual(await contrasts(), []);
  await page.click("#open-settings");
  await page.evaluate(() => {
    const select = document.querySelector("#settings [name=theme]");
    select.value = "light";
    select.dispatchEvent(new Event("input", { bubbles: true }));
  });
  assert.equal(await background(), light);
  await page.reload();
  assert.equal(await background(), light);
});

test("reduced motion stops animations", async ({ page }) => {
  await page.emulate({ "prefers-reduced-motion": "reduce" });
  await send(page, "slow answer");
  await sees(page, ".thoughts.thinking summary", "Thinking");
  assert.equal(await page.evaluate(() => document.getAnimations().length), 0);
});

test("the live view reads metrics only while it is open", async ({ page }) => {
  const polls = () => page.requests.filter((url) => url.endsWith("/metrics")).length;
  assert.equal(polls(), 0);
  await page.click("#toggle-server");
  await page.waitFor(() => document.querySelector(".chart .line").getAttribute("d")?.includes("L"));
  await page.waitFor(() => /^\d/.test(document.querySelector("#server tr:last-child td").textContent));
  const values = await texts(page, "#server :is(.figure, dd, td)");
  assert.match(values[0], /^[\d,]+ tokens\/s$/);
  assert.ok(values.includes("2,883,584 tokens"), values);
  assert.ok(values.includes("62%"), values);
  assert.ok(values.every((value) => !/NaN|undefined|Infinity/.test(value)), values);
  await page.click("#toggle-server");
  const count = polls();
  // There is no event to wait for: the test shows that no request follows within 1.5 s. An open panel sends one per second.
  await new Promise((resolve) => setTimeout(resolve, 1500));
  assert.ok(polls() <= count + 1);
});

test("quantiles agree with Prometheus", async ({ page }) => {
  const result = await page.evaluate(async () => {
    const { histogram, parseMetrics, quantile, total } = await import("./metrics.js");
    const text = '# TYPE x_h histogram\nx_h_bucket{le="1",m="a\\"b"} 2\nx_h_bucket{le="2"} 6\nx_h_bucket{le="+Inf"} 8\nx_c{a="1"} 3\nx_c{a="2"} 4e0 17\ny_c 9\n';
    const metrics = parseMetrics(text, "x_");
    const buckets = histogram(metrics, "h");
    return [total(metrics, "c"), total(metrics, "none") ?? null, ...[0.25, 0.5, 0.99].map((share) => quantile(buckets, share)), quantile(new Map(), 0.5) ?? null];
  });
  assert.deepEqual(result, [7, null, 1, 1.5, 2, null]);
});

test("the event parser takes any split of the stream", async ({ page }) => {
  const [whole, split] = await page.evaluate(async () => {
    const { EventParser } = await import("./sse.js");
    const stream = ": ping\r\n\r\ndata: one\r\n\r\nevent: x\ndata:two\ndata: three\n\ndata: \u{1f525}\n\ndata: cut";
    const parser = new EventParser();
    return [new EventParser().push(stream), [...stream].flatMap((character) => parser.push(character))];
  });
  assert.deepEqual(whole, ["one", "two\nthree", "\u{1f525}"]);
  assert.deepEqual(split, whole);
});

async function runTests() {
  const browser = new Browser();
  let passed = 0;
  const failed = [];
  for (const [name, run] of tests) {
    if (options.only && !name.includes(options.only)) continue;
    const server = await new MockServer().listen();
    const page = await browser.newPage();
    try {
      await page.goto(server.url);
      await run({ page, server });
      assert.deepEqual(page.problems, [], "problems that the browser reported");
      assert.deepEqual(server.violations, [], "violations of the content-security policy");
      passed += 1;
      console.log(`ok   ${name}`);
    } catch (error) {
      failed.push(name);
      console.log(`FAIL ${name}\n${error.stack.replace(/^/gm, "     ")}\n     ${page.problems.join("\n     ")}`);
    }
    await page.close();
    await server.close();
  }
  await browser.close();
  console.log(`${passed} passed, ${failed.length} failed`);
  return failed.length === 0;
}

try {
  if (options.pictures) await takePictures(options.pictures);
  else if (!(await runTests())) process.exitCode = 1;
} finally {
  rmSync(scratch, { recursive: true, force: true });
}
