"""Measures how often the demo model answers correctly, mainly on phrasings that are not in the training data.

    python evaluate.py SNAPSHOT                         run the snapshot in PyTorch; check answers, tool calls and JSON
    python evaluate.py --dump-questions questions.jsonl write the held-out questions: {"intent", "question"}
    python evaluate.py --answers answers.jsonl          check answers from another program: {"question", "text"}

An answer is correct if it equals the intent's answer or contains all of the intent's `keys`.
"""

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

from questions import Conversation, Sampler, Turn, load, load_intents
from tools import ToolSampler


@dataclass
class Case:
    conversation: Conversation
    intent_id: str
    values: dict[str, str]


def single_line(text):
    return " ".join(text.split())


def is_right(intent, text, values):
    def fill(part):
        for key, value in values.items():
            part = part.replace("{" + key + "}", value)
        return single_line(part)

    text = single_line(text)
    return text == fill(intent.answer) or all(fill(key) in text for key in intent.keys)


def held_out(intents):
    """Yields (intent id, question, values) for every held-out phrasing that needs no earlier turn."""
    names = load("names")["test"].split()
    for intent in intents.values():
        for i, question in enumerate(intent.test):
            if intent.id != "name-asked":  # needs an earlier turn
                values = {"name": names[i], "date": Conversation([]).date}
                yield intent.id, question.replace("{name}", values["name"]), values


def ask(question):
    return Turn(question, "", "")


def alone(intent_id, question, values):
    return Case(Conversation([ask(question)]), intent_id, values)


def third_turn(sampler, intent_id, question, values):
    before = [Turn(turn.user, turn.think, turn.answer) for turn in sampler.other_turns(2, date=values["date"])]
    return Case(Conversation([*before, ask(question)]), intent_id, values)


def with_tools(sampler, tools, intent_id, question, values):
    offered = [tools.spec(tool) for tool in tools.tools(sampler.random.randint(1, 2))]
    return Case(Conversation([ask(question)], tools=offered), intent_id, values)


def after_name(sampler, name, intent_id, question, values):
    hello = give_name(sampler, name, sampler.intents["name-given"].ask)
    return Case(Conversation([hello, ask(question)]), intent_id, values)


def asked_name(sampler, name, between, wordings, date):
    """Returns a case in which the user gives a name and asks for it after `between` other turns.

    `wordings` selects the phrasings: "ask" for phrasings from the training data, or "test" for held-out phrasings.
    """
    hello = give_name(sampler, name, getattr(sampler.intents["name-given"], wordings))
    others = sampler.other_turns(between, date=date)
    question = sampler.random.choice(getattr(sampler.intents["name-asked"], wordings)).replace("{name}", name)
    return Case(Conversation([hello, *others, ask(question)]), "name-asked", {"name": name})


def give_name(sampler, name, phrasings):
    """Returns a turn in which the user gives a name."""
    question = sampler.random.choice(phrasings).replace("{name}", name)
    return Turn(question, "", sampler.intents["name-given"].answer.replace("{name}", name))


def training_phrasing(sampler, intent_id, question, date):
    question = sampler.fill(question).replace("{name}", "Anna")
    return Case(Conversation([ask(question)]), intent_id, {"name": "Anna", "date": date})


def cases(sampler):
    """Returns a dict that maps each kind of test to its cases."""
    intents, names, date = sampler.intents, load("names")["test"].split(), Conversation([]).date
    tools = ToolSampler(sampler)
    kinds = {
        "held-out phrasings": [],
        "held-out phrasings, third turn": [],
        "held-out phrasings, with tools": [],
        "held-out phrasings, after the user gives a name": [],
        "held-out names": [],
        "held-out names and phrasings": [],
        "training phrasings": [],
    }
    # Do not change the order of these calls. Most of them draw from one random generator, so another order would
    # produce other cases, and the scores could not be compared with earlier ones.
    for case in held_out(intents):
        kinds["held-out phrasings"].append(alone(*case))
        kinds["held-out phrasings, third turn"].append(third_turn(sampler, *case))
        kinds["held-out phrasings, with tools"].append(with_tools(sampler, tools, *case))
        named = after_name(sampler, sampler.random.choice(names), *case)
        if named.intent_id not in ("name-given", "name-asked", "no-name"):
            kinds["held-out phrasings, after the user gives a name"].append(named)
    for name in names:
        for between in range(3):
            kinds["held-out names"].append(asked_name(sampler, name, between, "ask", date))
            kinds["held-out names and phrasings"].append(asked_name(sampler, name, between, "test", date))
    for intent in intents.values():
        if intent.id != "name-asked":  # needs an earlier turn
            for question in intent.ask:
                kinds["training phrasings"].append(training_phrasing(sampler, intent.id, question, date))
    return kinds


def report(kind, intents, answered, show_failures):
    """Prints and returns the share of correct answers. With `show_failures`, also prints the wrong answers.

    `answered` is a list of (intent id, question, values, text).
    """
    wrong = [
        (intent_id, question, text)
        for intent_id, question, values, text in answered
        if not is_right(intents[intent_id], text, values)
    ]
    share = 1 - len(wrong) / max(len(answered), 1)
    print(f"{kind:35} {len(answered) - len(wrong):5} of {len(answered):5} correct, {share:6.1%}", flush=True)
    by_answer = {single_line(intent.answer): intent.id for intent in intents.values()}
    for intent_id, question, text in wrong if show_failures else []:
        got = by_answer.get(single_line(text)) or repr(text[:70])
        print(f"    {question}\n        expected {intent_id}, got {got}")
    return share


def evaluate(snapshot, device="cpu", limit=None, max_tokens=160, batch=192, show_failures=True):
    """Runs a snapshot on up to `limit` cases of each kind. Prints and returns the share of correct answers per kind.

    Includes the cases of evaluate_tools.py.
    """
    from tokenizers import Tokenizer

    from evaluate_tools import generate, scores
    from harmony import Writer
    from model import load_snapshot

    model = load_snapshot(snapshot, device)
    writer = Writer(Tokenizer.from_file(str(Path(snapshot) / "tokenizer.json")))
    sampler = Sampler(seed=7)
    shares = {}
    for kind, all_cases in cases(sampler).items():
        count = len(all_cases) if limit is None else min(limit, len(all_cases))
        chosen = random.Random(7).sample(all_cases, count)
        prompts = [writer.prompt(case.conversation)[0] for case in chosen]
        texts = [writer.answer(ids) for ids in generate(model, writer, prompts, max_tokens, batch)]
        answered = [(c.intent_id, c.conversation.turns[-1].user, c.values, text) for c, text in zip(chosen, texts)]
        shares[kind] = report(kind, sampler.intents, answered, show_failures and kind == "held-out phrasings")
    return shares | scores(model, writer, limit, max_tokens, batch, show_failures)


def judge(answers_file):
    intents = load_intents()
    wanted = {question: (intent_id, values) for intent_id, question, values in held_out(intents)}
    answered = {}
    for line in Path(answers_file).read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        question = answer["question"]
        if question not in wanted:
            sys.exit(f"cannot check {answers_file}: {question!r} is not in the output of --dump-questions")
        if question in answered:
            sys.exit(f"cannot check {answers_file}: {question!r} is answered twice; keep one answer")
        intent_id, values = wanted[question]
        values = values | {"date": answer.get("date", values["date"])}
        answered[question] = (intent_id, question, values, answer["text"])
    if missing := wanted.keys() - answered.keys():
        print(f"held-out questions without an answer: {len(missing)}")
    report("held-out phrasings", intents, list(answered.values()), show_failures=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("snapshot", nargs="?", help="folder with config.json, model.safetensors and tokenizer.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, help="the maximum number of cases of each kind")
    parser.add_argument(
        "--answers", metavar="FILE", help="check the answers in FILE; the optional key `date` is the date in the prompt"
    )
    parser.add_argument("--dump-questions", metavar="FILE", help="write the held-out questions to FILE and exit")
    args = parser.parse_args()
    if args.limit is not None and args.limit < 1:
        parser.error("--limit must be at least 1")
    if args.dump_questions:
        rows = [{"intent": intent_id, "question": question} for intent_id, question, _ in held_out(load_intents())]
        Path(args.dump_questions).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif args.answers:
        judge(args.answers)
    elif args.snapshot:
        evaluate(args.snapshot, args.device, args.limit)
    else:
        parser.error("specify a snapshot, --answers or --dump-questions")


if __name__ == "__main__":
    main()
