"""Samples training conversations in which the demo model may call a tool.

Half of the tools come from data/tools.toml, and half are made up.
The question contains the arguments, and the answer contains every value of the result.
The model thus learns to copy values.
`python tools.py` prints some conversations.
"""

import json
import operator
import re
from dataclasses import dataclass
from decimal import Decimal

from questions import Call, Conversation, Sampler, Turn, lines, load

AFTER_CALL = "The tool has answered; use its result."
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NUMBERS = ("int", "number", "degrees", "age", "year")
SCHEMA_TYPES = {"int": "integer", "number": "number", "bool": "boolean", "switch": "boolean"}
BOOLS = [("on", "off"), ("true", "false"), ("yes", "no")]


@dataclass
class Tool:
    name: str
    about: str
    parameters: dict[str, str]  # maps names to kinds; the name of an optional parameter ends with ?
    ask: list[str]
    result: list[str]

    def kind(self, name):
        return self.parameters.get(name) or self.parameters[name + "?"]


def read_tools(held_out):
    for tool in load("tools")["tool"]:
        if tool.get("held_out", False) == held_out:
            parameters = dict(part.split(":") for part in tool["args"].split())
            yield Tool(tool["name"], tool["about"], parameters, lines(tool["ask"]), lines(tool["result"]))


def words(name):
    return name.replace("_", " ").rstrip("?")


def spoken(result):
    """Returns the answer to the user: the contents of a tool result as a sentence."""
    try:
        value = json.loads(result, parse_float=Decimal)
    except ValueError:
        return f"The result is: {result.rstrip('.')}."
    if isinstance(value, dict) and "error" in value:
        return f"The tool reports an error: {value['error']}."
    if isinstance(value, dict) and value:
        said = enumeration([fact(words(key), part) for key, part in value.items()])
        return f"{said[0].upper()}{said[1:]}."
    is_plural = isinstance(value, list) and len(value) > 1
    return f"The results are {plain(value)}." if is_plural else f"The result is {plain(value)}."


def fact(key, value):
    if isinstance(value, dict) and value:
        return enumeration([fact(f"{key} {words(inner)}", part) for inner, part in value.items()])
    is_plural = isinstance(value, list) and len(value) > 1 or re.search("[^su]s$", key)
    return f"the {key} {'are' if is_plural else 'is'} {plain(value)}"


def plain(value):
    if isinstance(value, list | dict):
        return enumeration([plain(part) for part in value]) or "empty"
    return value if isinstance(value, str) else str(value) if isinstance(value, Decimal) else json.dumps(value)


def enumeration(parts):
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1] if parts else ""


def literal(kind, text):
    """Returns a value of a kind, such as `int` or `city`, as JSON."""
    if kind in ("bool", "switch"):
        return "true" if text in [true for true, _ in BOOLS] else "false"
    return text if kind in NUMBERS else json.dumps(text, ensure_ascii=False)


class Values:
    """Samples values of kinds such as `city`, `int` and `date`. `held_out` selects words and names for tests only."""

    def __init__(self, sampler: Sampler, held_out=False):
        data = load("tools")
        self.sampler, self.random, self.held_out = sampler, sampler.random, held_out
        self.lists = {kind: text.split("|") for kind, text in data["held_out" if held_out else "values"].items()}
        self.test_names = load("names")["test"].split()

    def sample(self, kind):
        r, made_up = self.random, self.sampler.name
        if kind in self.lists:
            # Make up some values, so that the model learns to copy any word.
            is_made_up = not self.held_out and kind not in ("weather", "status", "shell") and r.random() < 0.4
            return self.invented(kind) if is_made_up else r.choice(self.lists[kind])
        name = r.choice(self.test_names) if self.held_out else made_up()
        match kind:
            case "int":
                return str(r.randint(0, r.choice([12, 12, 100, 100, 2000, 99999])))
            case "number":
                return f"{r.randint(0, 300)}.{r.randint(1, 99)}".rstrip("0") if r.random() < 0.5 else self.sample("int")
            case "degrees":
                return str(r.randint(-20, 42))
            case "age":
                return str(r.randint(1, 99))
            case "year":
                return str(r.randint(1900, 2030))
            case "date":
                return self.sampler.date()
            case "time":
                return f"{r.randint(0, 23)}:{r.randint(0, 59):02}"
            case "name":
                return name if r.random() < 0.7 else f"{name} {made_up()}"
            case "email":
                return f"{name.lower()}@{made_up().lower()}.{r.choice(['com', 'org', 'net', 'de', 'example'])}"
            case "phone":
                return f"{r.randint(0, 999):03}-{r.randint(0, 9999):04}"
            case "code":
                letters = "".join(r.choices("ABCDEFGHKLMNPQRSTXZ", k=r.randint(1, 3)))
                return f"{letters}{r.choice(['-', ''])}{r.randint(10, 99999)}"
            case "sum":
                parts = [str(r.randint(1, r.choice([12, 100, 2000]))) for _ in range(r.randint(2, 3))]
                space = r.choice([" ", " ", ""])
                return "".join(p if i == 0 else f"{space}{r.choice('+-*/')}{space}{p}" for i, p in enumerate(parts))
            case "bool":
                return r.choice(r.choice(BOOLS))
            case "switch":
                return r.choice(BOOLS[0])
        return r.choice(kind.split("|"))  # an enum

    def invented(self, kind):
        name = self.sampler.name()
        match kind:
            case "city" | "country" | "company" | "language":
                return name
            case "symbol" | "currency":
                return "".join(self.random.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=self.random.randint(3, 4)))
            case "topic" | "song" | "food" | "chore":
                other = self.random.choice(self.lists["word"] + self.lists["topic"])
                return self.random.choice([f"{name.lower()} {other}", f"{other} {name.lower()}"])
            case "file":
                return f"{name.lower()}.{self.random.choice(['txt', 'md', 'py', 'csv', 'log', 'json'])}"
            case "folder":
                return self.random.choice(["/", "./", ""]) + name.lower()
        return name.lower()


class ToolSampler:
    """Samples tools and conversations that use them.

    `held_out` selects tools and values that are not in the training data.
    With `only_trained_tools` in addition, the tools are from the training data, and only the values are held out.
    """

    def __init__(self, sampler: Sampler, held_out=False, only_trained_tools=False):
        self.sampler, self.random, self.held_out = sampler, sampler.random, held_out
        self.only_trained_tools = only_trained_tools
        self.values = Values(sampler, held_out)
        self.known = list(read_tools(held_out and not only_trained_tools))
        data = load("tools")
        kind = "test" if held_out else "train"
        self.nouns, self.verbs = data["nouns"][kind].split("|"), data["verbs"][kind].split("|")
        self.made_up = data["made_up"]

    def tool(self):
        is_known = self.only_trained_tools or self.random.random() < 0.5
        return self.random.choice(self.known) if is_known else self.invented()

    def invented(self):
        """Returns a made-up tool: a name such as `get_order_status`, random parameters, questions and results."""
        r, word = self.random, lambda: self.sampler.name().lower()
        chance = lambda p: not self.held_out and r.random() < p
        noun = word() if chance(0.12) else r.choice(self.nouns)
        verb = word() if chance(0.05) else r.choice(self.verbs)
        parameters = {}
        for _ in range(r.choices([0, 1, 2, 3], [10, 50, 28, 12])[0]):
            kind, names = r.choice(list(self.made_up["parameters"].items()))
            name = word() if chance(0.12) else r.choice(names.split("|"))
            if name not in map(words, parameters):
                optional = "?" if parameters and r.random() < 0.3 else ""
                parameters[name + optional] = r.choice(self.made_up["enums"]) if kind == "enum" else kind
        name = r.choice([f"{verb}_{noun}"] * 6 + [noun, f"{noun}_{verb}"]).replace(" ", "_")
        if r.random() < 0.12:
            name = re.sub(r"_(\w)", lambda m: m[1].upper(), name)
        names = {"{noun}": noun, "{verb}": words(verb), "{tool}": name}
        ask = [self.frame(parameters, names) for _ in range(4)]
        by = words(next(iter(parameters), "default"))
        about = r.choice(["", f"{words(verb).capitalize()} the {noun}", f"Returns the {noun}.", f"{noun} by {by}"])
        return Tool(name, about, parameters, ask, [self.result_format(noun) for _ in range(3)])

    def frame(self, parameters, names):
        """Returns a question for a made-up tool, with slots for arguments."""
        r, frames = self.random, {key: lines(text) for key, text in self.made_up.items() if isinstance(text, str)}
        used = [parameter for parameter in parameters if not parameter.endswith("?") or r.random() < 0.6]
        text = r.choice(frames["none"]) if not used else ""
        for parameter in used:
            parameter_kind = parameters[parameter]
            is_unclear = parameter_kind in ("bool", "int", "number") or "|" in parameter_kind
            needs_label = is_unclear or r.random() < 0.2
            frame = r.choice(self.made_up["more"] if text else frames["named" if needs_label else "first"])
            slot = "{" + parameter.rstrip("?") + "}"
            text = text.rstrip("?") + frame.replace("{label}", words(parameter)).replace("{0}", slot)
        for slot, word in names.items():
            text = text.replace(slot, word)
        return text[0].upper() + text[1:]

    def result_format(self, noun):
        """Returns a template for the result of a made-up tool, with slots for values."""
        r = self.random
        kinds = ["int", "int", "number", "word", "city", "name", "status", "date", "code", "color", "topic", "time"]
        form = r.choices(["object", "nested", "list", "text"], [55, 10, 10, 25])[0]
        if form == "text":
            return "{" + r.choice(kinds) + "}"
        if form == "list":
            return '["{word}", "{city}"]'
        keys = [noun, r.choice(self.nouns), r.choice(["note", "unit", "source"]), "date"][: r.randint(1, 4)]
        fields = []
        for key in dict.fromkeys(key.replace(" ", "_") for key in keys):
            kind = r.choice(kinds)
            fields.append(f'"{key}": ' + ("{" + kind + "}" if kind in NUMBERS else '"{' + kind + '}"'))
        result = "{" + ", ".join(fields) + "}"
        return f'{{"data": {result}}}' if form == "nested" else result

    def spec(self, tool):
        """Returns a tool in OpenAI's format, with descriptions of some parameters, chosen at random."""
        properties = {}
        for parameter, kind in tool.parameters.items():
            schema = {"type": SCHEMA_TYPES.get(kind, "string")}
            if self.random.random() < 0.3:
                schema["description"] = self.random.choice(["The {}", "the {} to use", "{}"]).format(words(parameter))
            properties[parameter.rstrip("?")] = schema | ({"enum": kind.split("|")} if "|" in kind else {})
        function = {"name": tool.name} | ({"description": tool.about} if tool.about else {})
        if properties or self.random.random() < 0.6:
            required = [parameter for parameter in tool.parameters if not parameter.endswith("?")]
            function["parameters"] = {"type": "object", "properties": properties, "required": required}
        return {"type": "function", "function": function}

    def question(self, tool):
        """Returns a question that needs `tool`, and the values of the arguments in the question, as strings."""
        ask = self.random.choice(tool.ask)
        slots = list(dict.fromkeys(re.findall(r"\{(\w+)\}", ask)))
        values = {name: self.values.sample(tool.kind(name)) for name in slots}
        if self.random.random() < 0.12:
            values = {name: value.lower() for name, value in values.items()}
        for i, name in enumerate(slots):  # `typed` could change the names of slots, but not numbers
            ask = ask.replace("{" + name + "}", "{" + str(i) + "}")
        ask = self.sampler.typed(ask) if not self.held_out else ask
        for i, name in enumerate(slots):
            ask = ask.replace("{" + str(i) + "}", values[name])
        return ask, values

    def result(self, tool, values):
        def fill(match):
            if match[1].startswith("="):
                a, sign, b = match[1][1:].split()
                return f"{OPERATORS[sign](Decimal(values[a]), Decimal(values[b])).normalize():f}"
            same = [value for name, value in values.items() if tool.kind(name) == match[1]]
            return same[0] if same and self.random.random() < 0.4 else self.values.sample(match[1])

        result = re.sub(r'\{(=?[^{}"]+)\}', fill, self.random.choice(tool.result))
        if result[:1] in ("{", "["):
            styles = [{}, {}, {"separators": (",", ":")}, {"indent": 2}]
            result = json.dumps(json.loads(result), ensure_ascii=False, **self.random.choice(styles))
        return result if self.random.random() > 0.03 else '{"error": "' + self.values.sample("topic") + '"}'

    def turn(self, tool):
        """Returns a turn that calls a tool and answers from its result."""
        user, values = self.question(tool)
        parameters = [name.rstrip("?") for name in tool.parameters if name.rstrip("?") in values]
        arguments = ", ".join(f'"{name}": {literal(tool.kind(name), values[name])}' for name in parameters)
        named = ", ".join(f"{name} = {literal(tool.kind(name), values[name]).strip(chr(34))}" for name in parameters)
        result = self.result(tool, values)
        think = f"Call {tool.name}: {named}." if named else f"Call {tool.name}."
        call = Call(tool.name, "{" + arguments + "}", result, think)
        return Turn(user, AFTER_CALL, spoken(result), [call])

    def tools(self, count):
        tools = {}
        while len(tools) < count:
            tool = self.tool()
            tools[tool.name] = tool
        return list(tools.values())

    def conversation(self, turns):
        """Returns a conversation with tools.

        A question may need an offered tool, no tool, or a tool that is not offered.
        """
        r, sampler = self.random, self.sampler
        offered = self.tools(r.choices([1, 2, 3, 4], [60, 20, 12, 8])[0])
        refused = sampler.intents["out-of-scope"]
        date, talk = sampler.date(), []
        for i in range(turns):
            is_last = i == turns - 1
            kind = r.choices(["call", "plain", "other"], [65, 22, 13] if is_last else [45, 45, 10])[0]
            if kind == "call":
                talk.append(self.turn(r.choice(offered)))
            elif kind == "plain":
                talk += sampler.other_turns(1, date=date)
            else:
                # The question needs a tool that is not offered, so the model refuses. But an offered tool might do if
                # its name shares a word with this tool. In this case, sample a call of an offered tool instead.
                other = self.tool()
                is_offered = any(set(words(other.name).split()) & set(words(tool.name).split()) for tool in offered)
                refusal = Turn(self.question(other)[0], refused.think, refused.answer)
                talk.append(self.turn(r.choice(offered)) if is_offered else refusal)
        if r.random() < 0.4:
            for call in talk[-1].calls:
                call.think = ""  # many clients do not send the reasoning back
        return Conversation(talk, date, sampler.effort(), sampler.developer(), [self.spec(tool) for tool in offered])


if __name__ == "__main__":
    sampler = ToolSampler(Sampler(seed=0))
    for _ in range(25):
        conversation = sampler.conversation(1)
        print("\n" + ", ".join(json.dumps(tool["function"]) for tool in conversation.tools))
        for turn in conversation.turns:
            calls = "".join(f"\n  ({call.think}) {call.name} {call.arguments} -> {call.result}" for call in turn.calls)
            print(f"> {turn.user}{calls}\n  ({turn.think}) {turn.answer}")
