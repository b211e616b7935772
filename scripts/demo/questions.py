"""Samples training conversations for the demo model from the intents in data/*.toml.

`python questions.py` prints a summary and some sampled conversations.
"""

import random
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

DATA = Path(__file__).parent / "data"


@dataclass
class Intent:
    """A question in several phrasings, and its answer."""

    id: str
    answer: str
    think: str
    keys: list[str]  # strings that a correct answer contains
    ask: list[str]  # phrasings to train on
    patterns: list[str]  # patterns that `expand` turns into more phrasings
    test: list[str]  # held-out phrasings, never used in training
    terms: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    weight: float = 0.0


@dataclass
class Call:
    """A tool call and its result."""

    name: str
    arguments: str  # JSON
    result: str
    think: str = ""  # the analysis before the call; empty if the client does not send it back


@dataclass
class Turn:
    user: str
    think: str
    answer: str
    calls: list[Call] = field(default_factory=list)  # before the answer
    pieces: list[tuple[str, float]] = field(default_factory=list)  # the answer in pieces, each with its loss weight
    think_weight: float = 1.0  # the loss weight of the analysis


@dataclass
class Conversation:
    turns: list[Turn]
    date: str = "2026-01-15"
    effort: str = "medium"
    developer: str = ""
    tools: list[dict] = field(default_factory=list)  # in OpenAI's format


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line]


def normal(text: str) -> str:
    """Returns the words of a text in lowercase, to compare phrasings."""
    return " ".join(re.findall(r"\w+", text.lower()))


def load(name: str) -> dict:
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


def expand(pattern: str, choose) -> str:
    """Replaces each `(this|that|)` with the alternative that `choose` picks, and removes extra spaces."""
    picked = re.sub(r"\(([^()]*\|[^()]*)\)", lambda m: choose(alternatives(m[1])), pattern)
    return re.sub(r"\s+(?=[?.,!](?:\s|$))|^\s+|\s+$|(?<=\s)\s+", "", picked)


def alternatives(text: str) -> list[str]:
    return re.split(r"(?<!<)\|(?!>)", text)  # the bars in <|end|> are not separators


def load_intents() -> dict[str, Intent]:
    intents, patterns, held_out = {}, load("patterns"), load("held_out")
    for name in ("using", "serving", "concepts", "talk"):
        for entry in load(name)["intent"]:
            texts = {"ask": lines(entry["ask"])}
            texts |= {"patterns": lines(patterns.pop(entry["id"], "")), "test": lines(held_out.pop(entry["id"], ""))}
            intent = Intent(**entry | texts)
            intent.weight = intent.weight or min(max(len(intent.ask) / 10, 0.7), 2.5)
            intents[intent.id] = intent
    trained = {normal(ask) for intent in intents.values() for ask in intent.ask}
    assert not patterns | held_out, f"phrasings for unknown intents: {list(patterns | held_out)}"
    for intent in intents.values():
        assert intent.keys, f"{intent.id}: `keys` is empty, so every answer would be correct"
        assert all(key in intent.answer for key in intent.keys), f"{intent.id}: the answer lacks one of `keys`"
        assert not trained & {normal(test) for test in intent.test}, f"{intent.id}: a held-out phrasing is trained on"
    return intents


# ---- phrasings ----

TERM_FRAMES = lines("""
What is {}?
What's {}?
what is {} exactly
What does {} mean?
What is meant by {}?
What is the meaning of {}?
What do you know about {}?
Explain {}
Explain {} to me
Can you explain {}?
Could you explain what {} is?
Please explain {} simply
Define {}
Describe {}
definition of {}
Tell me about {}
Tell me what {} is
Tell me something about {}
I don't understand {}
I don't know what {} is
I want to know about {}
I have heard of {}, what is it?
People talk about {}, what is that?
How does {} work?
{}?
{}
{} explained
Why does {} matter?
What is {} good for?
What is {} for?
Give me a short explanation of {}
What should I know about {}?
info on {}
the idea of {}
""")

FLAG_FRAMES = lines("""
What does {} do?
What is {}?
What is {} for?
What's {} for?
How do I use {}?
How does {} work?
When should I use {}?
Explain {}
Explain the option {}
Tell me about {}
What happens with {}?
Why would I use {}?
{}
{}?
the {} option
What does the option {} mean?
Give me an example of {}
I don't understand {}
Which values does {} take?
""")

HOW_FRAMES = lines("""
How can I {}?
How to {}
How does one {}?
How would I {}?
How could I {}?
How should I {}?
Can I {}?
Is it possible to {}?
Is there a way to {}?
Is there any way to {}?
Is there a command to {}?
Which command do I need to {}?
What do I type to {}?
What do I have to do to {}?
What must I do to {}?
What is the best way to {}?
What's the easiest way to {}?
What is the procedure to {}?
I want to {}
I would like to {}
I'd love to {}
I need to {}
I have to {}
I am trying to {}
I can't figure out how to {}
I don't know how to {}
Tell me how to {}
Show me how to {}
Teach me to {}
Explain how to {}
Help me {}
Let me {}
instructions to {}
{}
please {}
""")

PREFIXES = [
    "hey,", "hey", "hi,", "hello,", "please", "can you tell me", "could you tell me", "quick question:", "so", "ok",
    "ok so", "i wonder,", "um", "well,", "tell me,", "do you know", "one question:", "sorry,", "and", "now",
    "i'd like to know", "just curious,", "excuse me,", "question:", "another question:", "hmm,", "listen,", "alright,",
    "and now", "but", "then", "i was wondering,", "let me ask,", "say,", "would you know", "dear demo,",
]  # fmt: skip

SUFFIXES = [
    "please", "pls", "thanks", "thx", "??", "?!", "!", "...", "with inferno", "in inferno", "exactly", "then", "again",
    "in this program", "here", "really", "for me", "if I may ask", "today", "on my machine", "quickly", "anyway", "huh",
    "i forgot", "any idea", "can you help", "briefly", "in short",
]  # fmt: skip

SYNONYMS = {
    word: [alternative.strip() for alternative in alternatives.split(",")]
    for word, _, alternatives in (line.partition(": ") for line in lines("""
download: fetch, get, grab, pull, obtain, retrieve, pull down
downloaded: fetched, pulled, grabbed, got, retrieved
downloading: fetching, pulling, getting
downloads: fetches, pulls
fetch: grab, get, pull, download, retrieve
get: obtain, have, receive, achieve
model: LLM, language model, AI model, checkpoint, neural net
models: LLMs, language models, AI models, checkpoints, networks
weights: model weights, weight files, tensors
chat: conversation, dialogue, talk, session
conversation: chat, dialogue, discussion, session
talk: speak, chat, converse
start: launch, begin, open, run, boot
run: execute, use, launch, start, operate
launch: start, open, run
play: run, start, use
stop: halt, end, pause, cut
answer: reply, response, output
answers: replies, responses, outputs
reply: answer, response
show: display, print, give, reveal
see: view, check, look at, find out, inspect
change: modify, alter, adjust, edit, switch
set: change, specify, configure, choose, adjust, define
folder: directory, path, location, place
directory: folder, path
disk: drive, hard drive, ssd, storage
stored: saved, kept, located, put, placed
saved: stored, kept, written
save: store, keep, write
delete: remove, erase, get rid of, drop, uninstall
remove: delete, erase, throw away
quit: exit, leave, close, end
exit: quit, leave, close, get out
leave: exit, quit, get out
clear: reset, wipe, empty, erase
forget: drop, lose, erase
error: error message, failure, problem, message
fails: does not work, breaks, stops, gives an error
fast: quick, speedy
faster: quicker, speedier
slow: sluggish, laggy, not fast
speed: performance, pace
gpu: graphics card, video card, nvidia card, card, graphics processor
gpus: graphics cards, video cards, cards
vram: video memory, gpu memory, graphics memory
cpu: processor, plain cpu
use: utilise, make use of, apply, employ, work with, try
choose: pick, select, decide on
pick: choose, select
limit: restrict, cap, bound, reduce
need: require, want, have to have
needs: requires, wants
large: big, huge, long
larger: bigger, greater
big: large, huge
small: little, tiny, compact
smaller: tinier, lighter
explain: describe, clarify, tell me about, outline
mean: stand for, denote, signify
machine: computer, pc, laptop, system
computer: machine, pc, laptop
text: string, passage, document, paragraph
file: document, text file
files: documents, data
hide: conceal, suppress, switch off
reasoning: thinking, thoughts, thought process
thinking: reasoning, thoughts
internet: network, web, online access
offline: without internet, disconnected
install: set up, put on my machine, deploy
build: compile, make
compile: build, make
supported: compatible, possible, working, allowed
support: handle, allow, work with, offer, understand
flag: option, switch, parameter, argument
flags: options, switches, parameters
command: instruction, verb, subcommand
commands: instructions, verbs
licence: license
license: licence
quantisation: quantization
quantised: quantized, compressed
list: show, enumerate, display
print: show, output, write
made: created, built, developed, written
work: function, operate, run
works: functions, operates
difference: distinction, contrast
why: how come, for what reason, why on earth
maximum: max, upper limit of
random: arbitrary, unpredictable
repeat: say again, redo
often: frequently
good: decent, sensible, fine
best: ideal, optimal, right
possible: feasible, doable
many: lots of
version: release, edition
question: query
prompt: input, query
prompts: inputs
select: choose, pick
happens: occurs, goes on
missing: absent, not there, gone
broken: damaged, faulty
local: own, on-disk
several: multiple, two, many
memory: ram, space
"""))
}

FILLERS = {"the", "a", "an", "do", "i", "is", "to", "me", "does", "of", "my", "can", "it", "are"}
WORD = re.compile(r"[A-Za-z][A-Za-z']*")


class Sampler:
    """Samples training conversations. The same seed produces the same conversations."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.intents = load_intents()
        self.slots = load("talk")["slots"]
        self.prompts = load("talk")["developer"]["prompts"]
        self.names = load("names")["train"].split()
        self.topics = [i for i in self.intents.values() if not i.id.startswith(("name-", "no-name"))]
        self.weights = [intent.weight for intent in self.topics]
        self.held_out = {normal(test) for intent in self.intents.values() for test in intent.test}

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def date(self) -> str:
        r = self.random
        return f"{r.randint(2024, 2030)}-{r.randint(1, 12):02}-{r.randint(1, 28):02}"

    def effort(self) -> str:
        return self.random.choice(["low", "medium", "medium", "high"])

    def developer(self) -> str:
        """Returns a system prompt, which is usually empty and sometimes long."""
        if self.chance(0.8):
            return ""
        if self.chance(0.6):
            return self.random.choice(self.prompts)
        answers = [intent.answer for intent in self.random.choices(self.topics, k=3)]
        texts = [self.random.choice([*self.prompts, *answers]) for _ in range(self.random.randint(2, 5))]
        return self.random.choice([" ", "\n", "\n\n", "\n- "]).join(texts)

    def name(self) -> str:
        if self.chance(0.4):
            return self.random.choice(self.names)
        syllables = self.random.randint(2, 4)
        made_up = "".join(
            self.random.choice(["", *"bcdfghjklmnprstvwyz", "ch", "sh", "th", "br", "kr", "st", "gw", "qu"])
            + self.random.choice(["a", "e", "i", "o", "u", "ia", "ei", "ou", "y"])
            + self.random.choice(["", "", "", *"lmnrstdkx", "nd", "rt", "ck", "ff"])
            for _ in range(syllables)
        )
        return made_up.capitalize()

    def fill(self, text: str) -> str:
        """Fills the slots that the table [slots] in talk.toml defines. Leaves all other slots unchanged."""
        choose = lambda m: self.random.choice(self.slots[m[1]]) if m[1] in self.slots else m[0]
        return re.sub(r"\{(\w+)\}", choose, text)

    def wording(self, intent: Intent) -> str:
        """Returns a phrasing of an intent: handwritten, from a pattern, or from a frame such as `Explain {}`."""
        if intent.terms and self.chance(0.25):
            return self.random.choice(TERM_FRAMES).format(self.random.choice(intent.terms))
        if intent.flags and self.chance(0.2):
            return self.random.choice(FLAG_FRAMES).format(self.random.choice(intent.flags))
        if intent.patterns and self.chance(0.5):
            return self.fill(expand(self.random.choice(intent.patterns), self.random.choice))
        ask = self.fill(self.random.choice(intent.ask))
        how = re.fullmatch(r"How (?:do|can) I (.+)\?", ask)
        if how and self.chance(0.5):
            ask = self.random.choice(HOW_FRAMES).replace("{}", how[1])
        return ask

    def typo(self, text: str) -> str:
        words = [m for m in WORD.finditer(text) if len(m[0]) >= 4]
        if not words:
            return text
        at = self.random.choice(words).start() + self.random.randint(1, 2)
        kind = self.random.randrange(3)
        if kind == 0:
            return text[:at] + text[at + 1 :]  # drop a letter
        if kind == 1:
            return text[:at] + text[at] + text[at:]  # double a letter
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]  # swap two letters

    def question(self, intent: Intent) -> str:
        """Returns a random phrasing of an intent. Never returns a held-out phrasing."""
        while normal(question := self.typed(self.wording(intent))) in self.held_out:
            pass
        return question

    def typed(self, text: str) -> str:
        """Varies a phrasing as users do, for example with synonyms, a prefix, a typo or missing punctuation.

        Does not change a text with the slot {name}, because a typo or uppercase would break the slot.
        """
        if "{name}" in text or len(text) < 3:
            return text

        def swap(match):
            alternatives = SYNONYMS.get(match[0].lower())
            return self.random.choice(alternatives) if alternatives and self.chance(0.3) else match[0]

        if self.chance(0.6):
            text = WORD.sub(swap, text)
        words = text.split()
        if len(words) > 3 and self.chance(0.12):  # drop a short word
            small = [i for i, word in enumerate(words) if word.lower() in FILLERS]
            if small:
                words.pop(self.random.choice(small))
                text = " ".join(words)
        if len(words) > 2 and self.chance(0.2):
            text = f"{self.random.choice(PREFIXES)} {text[0].lower()}{text[1:]}"
        if len(words) > 2 and self.chance(0.1):
            text = f"{text.rstrip('?.')} {self.random.choice(SUFFIXES)}"
        if self.chance(0.12):
            text = self.typo(text)
        if self.chance(0.4):
            text = re.sub(r"[?.,!:]+(?=\s|$)", "", text) or text
        if self.chance(0.5):
            text = text.lower()
        elif self.chance(0.02):
            text = text.upper()
        return text

    def turn(self, intent: Intent, **values: str) -> Turn:
        """Returns one turn of an intent, with slots such as {name} replaced by the value in `values`."""
        user = self.question(intent)
        parts = [user, intent.think, intent.answer]
        for key, value in values.items():
            parts = [part.replace("{" + key + "}", value) for part in parts]
        return Turn(*parts)

    def other_turns(self, count: int, **values: str) -> list[Turn]:
        return [self.turn(i, **values) for i in self.random.choices(self.topics, self.weights, k=count)]

    def conversation(self, turns: int) -> Conversation:
        """Returns a conversation of at most `turns` turns.

        In some conversations, the user gives a name and may later ask for it.
        """
        r = self.random
        date = self.date()
        if self.chance(0.45 if turns > 1 else 0.04):
            name = self.name()
            name = name.lower() if self.chance(0.15) else name
            talk = [self.turn(self.intents["name-given"], name=name)]
            if turns > 1:
                # The user asks for the name at a random later point or never, so the model cannot expect the question.
                before = r.randint(0, 1) if turns > 2 else 0
                rest = self.other_turns(r.randint(1, turns - 1 - before), date=date)
                if self.chance(0.6):
                    rest[r.randrange(len(rest))] = self.turn(self.intents["name-asked"], name=name)
                talk = self.other_turns(before, date=date) + talk + rest
        else:
            talk = self.other_turns(turns, date=date)
            if self.chance(0.015):
                talk[-1] = self.turn(self.intents["no-name"])
        return Conversation(talk, date, self.effort(), self.developer())


if __name__ == "__main__":
    sampler = Sampler(seed=0)
    intents = sampler.intents.values()
    print(
        f"{len(intents)} intents, {sum(len(i.ask) for i in intents)} training phrasings, "
        f"{sum(len(i.patterns) for i in intents)} patterns, {sum(len(i.test) for i in intents)} held-out phrasings"
    )
    for turns in (1, 1, 1, 1, 1, 1, 1, 1, 1, 3, 3):
        print()
        for turn in sampler.conversation(turns).turns:
            print(f"> {turn.user}\n  ({turn.think}) {turn.answer}")
