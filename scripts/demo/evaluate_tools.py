"""Measures how often the demo model calls tools, answers from tool results and writes JSON correctly.

The words and names that fill the test cases are not in the training data.
The tools are not in the training data either, except in the tests of known tools.

    python evaluate_tools.py SNAPSHOT
    python evaluate_tools.py --dump-prompts ../../tests/golden/demo_prompts.json

The second command writes conversations with tools and their prompts as text.
A test compares these prompts with the prompts that inferno renders for the same conversations.
"""

import argparse
import json
import re
from decimal import Decimal
from pathlib import Path

from tokenizers import Tokenizer

from harmony import Writer, openai_messages
from objects import ObjectSampler
from questions import Conversation, Sampler, Turn
from tools import NUMBERS, ToolSampler, plain

CASES = 200  # the number of cases of each kind of test


def generate(model, writer, prompts, max_tokens, batch):
    """Completes prompts in batches of similar length. Returns the completions in the order of `prompts`."""
    completions = [[]] * len(prompts)
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(prompts), batch):
        rows = by_length[start : start + batch]
        for i, ids in zip(rows, model.generate([prompts[i] for i in rows], writer.stop_ids, max_tokens)):
            completions[i] = ids
    return completions


def with_tool(sampler, tool):
    """Returns a conversation whose only turn calls `tool`. The conversation may offer up to two other tools."""
    others = [other for other in sampler.tools(sampler.random.randint(1, 3)) if other.name != tool.name][:2]
    offered = [*others, tool]
    sampler.random.shuffle(offered)
    return Conversation([sampler.turn(tool)], tools=[sampler.spec(tool) for tool in offered])


def without_calls(conversation):
    return Conversation([Turn(conversation.turns[0].user, "", "")], tools=conversation.tools)


def canonical(text):
    """Returns the same text for equal JSON values, such as `1` and `1.0`.

    Comparing the parsed values with `==` would also treat `1` and `true` as equal.
    """
    return json.dumps(json.loads(text, parse_int=float), sort_keys=True)


def is_same_call(call, expected):
    try:
        return bool(call) and call[0] == expected.name and canonical(call[1]) == canonical(expected.arguments)
    except ValueError:
        return False


def values(result):
    """Returns the values in a tool result, at least one, each as `spoken` in tools.py writes it."""
    try:
        return leaves(json.loads(result, parse_float=Decimal))
    except ValueError:
        return [result.rstrip(".")]


def leaves(value):
    if isinstance(value, dict | list) and value:
        parts = value.values() if isinstance(value, dict) else value
        return [text for part in parts for text in leaves(part)]
    return [plain(value)]


def contains(text, value):
    """Returns whether `text` contains `value` other than as a part of a longer word, number, date or time."""
    pattern = rf"(?<![\w-])(?<!\d[.,:]){re.escape(value)}(?![\w-])(?![.,:]\d)"
    return bool(value) and re.search(pattern, text) is not None


def schema_answers(model, writer, cases, max_tokens, batch):
    """Lets the model write only the values of JSON answers. The analysis and the rest of the JSON are given.

    This simulates a schema. Returns the values of each answer, with None for an invalid value.
    """
    answers, prompts = [[] for _ in cases], []
    for conversation, facts in cases:
        think = writer.message("assistant", conversation.turns[0].think, "analysis")[len(writer.assistant) :]
        start = writer.message("assistant", "", "final")[:-1]  # without <|end|>
        prompts.append(writer.prompt(conversation)[0] + think + start + writer.text("{"))
    for i in range(max(len(facts) for _, facts in cases)):
        rows = [row for row, (_, facts) in enumerate(cases) if i < len(facts)]
        for row in rows:
            key, kind, _ = cases[row][1][i]
            separator = '": "' if kind == "text" else '": '
            prompts[row] = prompts[row] + writer.text('"') + writer.text(key) + writer.text(separator)
        for row, ids in zip(rows, generate(model, writer, [prompts[row] for row in rows], max_tokens, batch)):
            text = writer.tokenizer.decode(ids)
            is_text = cases[row][1][i][1] == "text"
            value = re.match(r'((?:[^"\\]|\\.)*)"' if is_text else r"(-?[\d.]+)[,}]", text)
            answers[row].append(value[1] if value else None)
            prompts[row] += writer.text((value[1] if value else "") + ('", ' if is_text else ", "))
    return answers


def scores(model, writer, limit=None, max_tokens=160, batch=192, show_failures=True):
    """Prints and returns the share of correct completions for each kind of test.

    Each kind has `limit` cases, but at most `CASES`.
    """
    count, shares = CASES if limit is None else min(limit, CASES), {}

    def report(kind, rows, fails_shown=8):
        """Reports one kind of test.

        Each row is a tuple: whether the completion is correct, the question or the tool result, and the completion.
        """
        wrong = [row for row in rows if not row[0]]
        shares[kind] = 1 - len(wrong) / len(rows)
        print(f"{kind:35} {len(rows) - len(wrong):5} of {len(rows):5} correct, {shares[kind]:6.1%}", flush=True)
        for _, question, got in wrong[:fails_shown] if show_failures else []:
            print(f"    {question}\n        got {got!r}")

    for kind, is_known in (("calls of known tools", True), ("calls of other tools", False)):
        sampler = ToolSampler(Sampler(seed=11), held_out=True, only_trained_tools=is_known)
        cases = [with_tool(sampler, sampler.tool()) for _ in range(count)]
        prompts = [writer.prompt(without_calls(case))[0] for case in cases]
        rows = []
        for case, ids in zip(cases, generate(model, writer, prompts, max_tokens, batch)):
            expected, call = case.turns[0].calls[0], writer.call(ids)
            question = f"{case.turns[0].user}  [{expected.name} {expected.arguments}]"
            rows.append((is_same_call(call, expected), question, call or writer.answer(ids)))
        report(kind, rows)
        rows = []
        prompts = [writer.prompt(case)[0] for case in cases]
        for case, ids in zip(cases, generate(model, writer, prompts, max_tokens, batch)):
            result, text = case.turns[0].calls[0].result, writer.answer(ids)
            is_right = all(contains(text, value) for value in values(result))
            rows.append((is_right, " ".join(result.split()), text))
        report(f"answers after {kind}", rows)

    sampler = ObjectSampler(Sampler(seed=12), held_out=True)
    cases, expected = [], []
    for _ in range(count):
        text, facts = sampler.facts()
        turn = sampler.asked(text, sampler.chosen(facts))
        cases.append(Conversation([Turn(turn.user, "", "")]))
        expected.append(turn.answer)
    rows, prompts = [], [writer.prompt(case)[0] for case in cases]
    for case, want, ids in zip(cases, expected, generate(model, writer, prompts, max_tokens, batch)):
        rows.append((writer.answer(ids) == want, case.turns[0].user, writer.answer(ids)))
    report("JSON on request", rows)

    cases = []
    for _ in range(count):
        text, facts = sampler.facts()
        turn = Turn(text, sampler.sampler.intents["out-of-scope"].think, "")
        facts = [(key, "number" if kind in NUMBERS else "text", value) for key, kind, value in facts]
        cases.append((Conversation([turn]), facts))
    rows = []
    for (case, facts), got in zip(cases, schema_answers(model, writer, cases, min(max_tokens, 40), batch)):
        rows.append((got == [value for _, _, value in facts], case.turns[0].user, got))
    report("JSON under a schema", rows)
    return shares


def dump_prompts(path):
    """Writes conversations with tools, and the prompt of each as text."""
    tokenizer = Path(__file__).parents[2] / "assets/demo/tokenizer.json"
    writer = Writer(Tokenizer.from_file(str(tokenizer)))
    sampler, prompts = ToolSampler(Sampler(seed=5)), []
    covered = ['" | "', "boolean", "?: ", " = () => any", "<|channel|>analysis", "Reasoning: low", "# Instructions"]
    while len(prompts) < 8 or not all(any(part in prompt["text"] for prompt in prompts) for part in covered):
        conversation = sampler.conversation(sampler.random.randint(1, 3))
        text = writer.tokenizer.decode(writer.prompt(conversation)[0], skip_special_tokens=False)
        fields = {"messages": openai_messages(conversation), "tools": conversation.tools}
        prompts.append(fields | {"date": conversation.date, "effort": conversation.effort, "text": text})
    path.write_text(json.dumps(prompts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("snapshot", nargs="?", help="folder with config.json, model.safetensors and tokenizer.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, help="the maximum number of cases of each kind")
    parser.add_argument("--dump-prompts", type=Path, metavar="FILE", help="write conversations and prompts, and exit")
    args = parser.parse_args()
    if args.limit is not None and args.limit < 1:
        parser.error("--limit must be at least 1")
    if args.dump_prompts:
        dump_prompts(args.dump_prompts)
    elif args.snapshot:
        from model import load_snapshot

        writer = Writer(Tokenizer.from_file(str(Path(args.snapshot) / "tokenizer.json")))
        scores(load_snapshot(args.snapshot, args.device), writer, args.limit)
    else:
        parser.error("specify a snapshot or --dump-prompts")


if __name__ == "__main__":
    main()
