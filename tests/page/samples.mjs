// The answers of the mock server.

export const REASONING = `The user asks how paged attention works. I should explain blocks, the block table and why it avoids fragmentation. \
A short code sample and a small table would help. Keep the answer brief.`;

const ATTENTION = `**Paged attention** stores the keys and values of a sequence in blocks of fixed size. A *block table* maps \
positions to blocks, so the cache of a sequence does not have to be contiguous.

### Why it helps

1. No memory is reserved for tokens that may never come.
2. Sequences with the same prefix share blocks.
3. A finished sequence returns its blocks at once.

The lookup is one division and one index:

\`\`\`rust
/// Returns the place of a token in the KV cache.
fn slot(table: &[u32], position: usize, block_size: usize) -> usize {
    let block = table[position / block_size] as usize;
    block * block_size + position % block_size
}
\`\`\`

| block size | waste per sequence | lookups |
| ---: | ---: | :--- |
| 16 | 7.5 tokens | many |
| 64 | 31.5 tokens | few |

> Smaller blocks waste less memory; larger ones need fewer lookups.

The idea comes from [the vLLM paper](https://arxiv.org/abs/2309.06180).`;

const MARKDOWN = `# Heading one

Text with *emphasis*, **strong**, ***both***, ~~struck~~, \`code\` and snake_case_name.

Setext heading
--------------

- bullet
  - nested
    1. ordered
- [x] done
- [ ] open

3. three
4. four

> quote
continues

| a | b |
|---|:-:|
| 1 | \`x\\|y\` |

\`\`\`python
def f():
	return "tab"
\`\`\`

    indented

***

[text](https://example.com/a_b "title"), <https://example.org/> and https://example.net/path_(x), and \\*escaped\\*.
Line one  
line two<br>line three &amp; &lt;b&gt;

\\[ a_1 + b_1 = c_1 \\]

Inline \\( x_1 * y_1 \\) math.`;

/** Everything that a hostile model might try. No request may reach `probe.test`. */
export const HOSTILE = `<script>window.hacked = 1</script>
<img src="http://probe.test/img.png" onerror="window.hacked = 1">
<svg onload="window.hacked = 1"></svg><iframe src="http://probe.test/"></iframe>
<style>body { display: none }</style><link rel="stylesheet" href="http://probe.test/a.css">
<a href="javascript:window.hacked=1">raw</a><form action="http://probe.test/"><input autofocus onfocus="window.hacked=1"></form>

![beacon](http://probe.test/pixel.png?secret) ![data](data:image/svg+xml,<svg/onload=alert(1)>)

[script](javascript:window.hacked=1) [upper](JaVaScRiPt:window.hacked=1) [tab](java&#9;script:window.hacked=1)
[data](data:text/html,<script>window.hacked=1</script>) [vb](vbscript:x) [file](file:///etc/passwd) [relative](/v1/models)
[bank](https://evil.test/login) [https://bank.test](https://evil.test/) https://bank.test@evil.test/ [homograph](https://аррӏе.test/)
<javascript:window.hacked=1> ["><img src=x onerror=window.hacked=1>](https://ok.test/"onmouseover="window.hacked=1)

Escape: \u001b[31mred\u001b[0m, NUL: \u0000, bell: \u0007, C1: \u009b31m, entity: &#27;[2J &#x202e;
Bidi: \u202egnp.exe\u202c \u2066isolate\u2069, zero\u200bwidth, tag: \u{e0041}\u{e0042}, soft\u00adhyphen.
Zalgo: ${"a" + "\u0300\u0301\u0302\u0303\u0304".repeat(60)}

\`\`\`html"onload="window.hacked=1
<script>window.hacked = 1</script>\u202e
\`\`\`

| <img src=x onerror=window.hacked=1> | [x](javascript:1) |
|---|---|
| <script>window.hacked=1</script> | \u202e |
`;

/** Texts that take a careless parser quadratic time or exhaust its stack. */
export const HEAVY = {
  "a long code block": "```\n" + "x = x + 1  # a line of code\n".repeat(4000) + "```\n",
  "a long line of code": "```\n" + "x".repeat(100_000) + "\n```\n",
  "a long word": "x".repeat(100_000),
  "deep quotes": ">".repeat(20_000) + " end",
  "deep lists": Array.from({ length: 2000 }, (_, depth) => "  ".repeat(depth % 400) + "- item").join("\n"),
  "one-line lists": "- ".repeat(20_000) + "end",
  "open brackets": "[".repeat(40_000),
  "open images": "![".repeat(20_000) + "](x)".repeat(2000),
  "links without an end": "[a](b ".repeat(8000),
  "emphasis": "*a **b ".repeat(7000),
  "alternating marks": "*_".repeat(24_000),
  "backticks": Array.from({ length: 300 }, (_, length) => "`".repeat(length + 1)).join(" "),
  "spaces": "#" + " ".repeat(40_000) + "x\n-" + " ".repeat(40_000) + "|",
  "a wide table": "|".repeat(40_000) + "\n" + "|-".repeat(20_000) + "\n",
  "a long table": "| a | b |\n|---|---|\n" + "| 1 | 2 |\n".repeat(3000),
  "many paragraphs": "word\n\n".repeat(5000),
  "parentheses": "http://a.test/" + ")".repeat(40_000),
  "entities": "&#".repeat(20_000) + "&amp;".repeat(4000),
  "math": "\\(".repeat(20_000) + "$$ ".repeat(3),
};

/** The answers by the first word of the message. */
export const ANSWERS = {
  Explain: { text: ATTENTION, hasReasoning: true },
  Draft: { text: ATTENTION },
  markdown: { text: MARKDOWN },
  hostile: { text: HOSTILE, hasReasoning: true },
  slow: { text: "One word after another, ".repeat(100), hasReasoning: true },
  cut: { text: "This answer ends before it is complete, because the connection is cut." },
  fault: { text: "This answer ends before it is complete, because of a fault." },
  code: { text: HEAVY["a long code block"] },
};
