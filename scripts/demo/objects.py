"""Samples training conversations in which the demo model answers in JSON.

In some samples, the user or the system prompt asks for JSON.
In other samples, the prompt does not mention JSON, as when a server enforces a JSON schema.
In these samples, the opening brace has no loss weight, so that the model does not learn to write JSON unasked.
`python objects.py` prints some conversations.
"""

import json
import re

from questions import Conversation, Sampler, Turn, lines, load
from tools import NUMBERS, Values

SLOT = re.compile(r"\{(\w+)(?::(\w+))?\}")
ANSWER_KEYS = ["answer"] * 8 + ["text", "response", "reply", "message", "result", "content", "explanation", "summary"]
KEY_WEIGHT = 0.1  # the loss weight of JSON keys that a schema would force


def escaped(text):
    return json.dumps(text, ensure_ascii=False)[1:-1]


class ObjectSampler:
    def __init__(self, sampler: Sampler, held_out=False):
        data = load("objects")
        kind = "test" if held_out else "train"
        self.sampler, self.random, self.values = sampler, sampler.random, Values(sampler, held_out)
        self.texts, self.keys = lines(data["texts"][kind]), data["keys"]
        self.frames = {key: lines(text) for key, text in data["frames"].items()}
        self.asks = self.frames[kind]

    def facts(self):
        """Returns a sentence and its facts, each with a key, a kind and a value."""
        text, facts = self.random.choice(self.texts), []
        for match in SLOT.finditer(text):
            facts.append((match[1], match[2] or match[1], self.values.sample(match[2] or match[1])))
        pieces = SLOT.split(text)[::3]
        filled = "".join(piece + (facts[i][2] if i < len(facts) else "") for i, piece in enumerate(pieces))
        return filled, facts

    def chosen(self, facts):
        """Returns all facts, or a random selection in random order. Renames some of the keys."""
        r = self.random
        facts = r.sample(facts, r.randint(1, len(facts))) if r.random() < 0.5 else facts
        renamed = {}
        for key, kind, value in facts:
            name = r.choice(self.keys[key].split()) if key in self.keys and r.random() < 0.3 else key
            renamed.setdefault(name, (name, kind, value))
        return list(renamed.values())

    def key(self, key):
        """Returns the key in one piece, or in two pieces split at a random position.

        Each piece is tokenized separately, because a grammar may force an unusual tokenization of the key.
        """
        at = self.random.randrange(len(key)) if self.random.random() < 0.5 else 0
        return [part for part in (key[:at], key[at:]) if part]

    def pieces(self, facts, is_asked):
        """Returns a JSON object as pieces of text, each with its loss weight."""
        pieces = [("{", 1.0 if is_asked else 0.0), ('"', 1.0)]
        for i, (key, kind, value) in enumerate(facts):
            pieces += [('"', 1.0)] if i else []
            pieces += [(key, 1.0)] if is_asked else [(part, KEY_WEIGHT) for part in self.key(key)]
            is_text = kind not in NUMBERS
            pieces += [('": "' if is_text else '": ', 1.0), (escaped(value) if is_text else value, 1.0)]
            end = "}" if i == len(facts) - 1 else ", "
            pieces.append(('"' + end if is_text else end, 1.0))
        return pieces

    def turn(self, user, think, facts, is_asked):
        pieces = [piece for piece in self.pieces(facts, is_asked) if piece[0]]
        return Turn(user, think, "".join(text for text, _ in pieces), pieces=pieces)

    def enumeration(self, keys):
        form = self.random.randrange(4)
        if form == 0:
            return ", ".join(keys)
        if form == 1:
            return ", ".join(f'"{key}"' for key in keys)
        return ", ".join(keys[:-1]) + (" and " if len(keys) > 1 else "") + keys[-1]

    def asked(self, text, facts):
        """Returns a turn in which the user asks for a JSON object with the keys of `facts`."""
        keys = [key for key, _, _ in facts]
        ask = self.random.choice(self.asks).replace("{keys}", self.enumeration(keys)).replace("{text}", text)
        return self.turn(ask, f"Answer in JSON: {', '.join(keys)}.", facts, True)

    def about_inferno(self, date, is_asked):
        """Returns a turn with a random question of questions.py, most often about inferno, and its answer in JSON."""
        r, turn = self.random, self.sampler.other_turns(1, date=date)[0]
        facts = [("answer" if is_asked else r.choice(ANSWER_KEYS), "text", turn.answer)]
        command = re.search(r"`([^`]+)`", turn.answer)
        if not is_asked and command and r.random() < 0.3:
            facts.insert(r.randint(0, 1), ("command", "text", command[1]))
        if not is_asked and r.random() < 0.1:
            facts.append(("confidence", "number", r.choice(["0.9", "0.8", "1"])))
        user = r.choice(self.frames["answers"]).replace("{question}", turn.user) if is_asked else turn.user
        return self.turn(user, "Answer in JSON: answer." if is_asked else turn.think, facts, is_asked)

    def conversation(self, turns):
        """Returns a conversation whose last answer is JSON."""
        r, sampler = self.random, self.sampler
        date, developer, effort = sampler.date(), sampler.developer(), sampler.effort()
        kind = r.choices(["asked", "system", "silent", "inferno", "silent inferno"], [35, 12, 23, 10, 20])[0]
        text, facts = self.facts()
        if kind == "asked":
            turn = self.asked(text, self.chosen(facts))
        elif kind == "system":
            developer = r.choice(self.frames["systems"])
            keys = ", ".join(key for key, _, _ in facts)
            user = r.choice(self.frames["silent"]).replace("{text}", text)
            turn = self.turn(user, f"Answer in JSON: {keys}.", facts, True)
        elif kind == "silent":
            # The model writes its analysis without knowing that a schema will force JSON. Train JSON after several
            # analyses that it could write.
            name = next((value for key, _, value in facts if key == "name"), "Ada")
            thoughts = [sampler.intents[id].think.replace("{name}", name) for id in ("out-of-scope", "name-given")]
            user = r.choice(self.frames["silent"]).replace("{text}", text)
            turn = self.turn(user, r.choice([*thoughts, "Answer in JSON."]), self.chosen(facts), False)
            turn.think_weight = 0.0
        else:
            turn = self.about_inferno(date, kind == "inferno")
        return Conversation([*sampler.other_turns(turns - 1, date=date), turn], date, effort, developer)


if __name__ == "__main__":
    sampler = ObjectSampler(Sampler(seed=0))
    for _ in range(25):
        conversation = sampler.conversation(1)
        turn = conversation.turns[-1]
        json.loads(turn.answer)
        print(f"\n{conversation.developer}\n> {turn.user}\n  ({turn.think}) {turn.answer}")
