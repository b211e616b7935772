"""Renders conversations as token ids in gpt-oss's chat format, and trains the demo model's tokenizer.

inferno must render the same text as this module.
`evaluate_tools.py` writes prompts to `tests/golden/demo_prompts.json`. A test compares these prompts with inferno's.
"""

import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = [
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>",
    "<|start|>", "<|end|>", "<|message|>", "<|call|>",
]  # fmt: skip
STOP = ["<|return|>", "<|endoftext|>", "<|call|>"]
PAST_WEIGHT = 0.3  # the loss weight of earlier answers, and of calls without an analysis; the last answer has weight 1

# The pattern that splits text before byte-pair encoding: o200k's pattern, except that every digit is a separate piece.
SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def system_text(date, effort, has_tools=False):
    text = (
        "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
        f"Current date: {date}\n\nReasoning: {effort}\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    )
    return text + "\nCalls to these tools must go to the commentary channel: 'functions'." if has_tools else text


def developer_text(instructions, tools):
    """Returns the text of the developer message. Supports only the parameter schemas that `tools.py` generates."""
    sections = [f"# Instructions\n\n{instructions}"] if instructions else []
    if tools:
        types = "".join(tool_type(tool["function"]) for tool in tools)
        sections.append(f"# Tools\n\n## functions\n\nnamespace functions {{\n{types}\n}} // namespace functions")
    return "\n\n".join(sections)


def tool_type(function):
    """Returns a tool as a TypeScript type."""
    about = f"\n// {function['description']}" if function.get("description") else ""
    if "parameters" not in function:
        return f"{about}\ntype {function['name']} = () => any;\n"
    lines = ""
    for name, schema in function["parameters"]["properties"].items():
        lines += f"// {schema['description']}\n" if "description" in schema else ""
        number = {"integer": "number"}.get(schema["type"], schema["type"])
        kind = " | ".join(f'"{value}"' for value in schema.get("enum", [])) or number
        optional = "" if name in function["parameters"].get("required", []) else "?"
        lines += f"{name}{optional}: {kind},\n"
    return f"{about}\ntype {function['name']} = (_: {{\n{lines}}}) => any;\n"


def openai_messages(conversation):
    """Returns a conversation as messages of OpenAI's API, without the last answer."""
    messages = [{"role": "system", "content": conversation.developer}] if conversation.developer else []
    for i, turn in enumerate(conversation.turns):
        messages.append({"role": "user", "content": turn.user})
        for j, call in enumerate(turn.calls):
            function = {"name": call.name, "arguments": call.arguments}
            calls = [{"id": f"call_{i}_{j}", "type": "function", "function": function}]
            reasoning = {"reasoning": thought(call.think, conversation.effort)} if call.think else {}
            messages.append({"role": "assistant", "content": None, "tool_calls": calls} | reasoning)
            messages.append({"role": "tool", "tool_call_id": f"call_{i}_{j}", "content": call.result})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages[:-1]


def thought(think, effort):
    """Returns the analysis for a reasoning effort: for "low", only the part before the first colon or semicolon."""
    return re.split(r"[:;]", think)[0].rstrip(".") + "." if effort == "low" else think


def after(ids, marker):
    """Returns the ids that follow the first occurrence of `marker`, or an empty list if it does not occur."""
    for end in range(len(marker), len(ids)):
        if ids[end - len(marker) : end] == marker:
            return ids[end:]
    return []


def train_tokenizer(texts, vocab_size):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == vocab_size - len(CONTROL), "not enough text for this vocabulary size"
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return tokenizer


class Writer:
    """Converts conversations to token ids. Text never becomes a control token."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        tokenizer.encode_special_tokens = True
        self.control = {token: tokenizer.token_to_id(token) for token in CONTROL}
        self.stop_ids = [self.control[token] for token in STOP]
        self.known = {}  # a cache from text to ids, because many answers and analyses occur repeatedly
        # The ids of `<|start|>assistant`. Every prompt ends with these ids.
        self.assistant = [self.control["<|start|>"], *self.text("assistant")]

    def text(self, text):
        if text not in self.known:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(self.known) > 20_000:
                self.known.clear()
            self.known[text] = ids
        return self.known[text]

    def message(self, role, text, channel="", end="<|end|>", content_type=""):
        """Returns the ids of a message. `text` is a string or a list of ids."""
        header = [self.control["<|start|>"], *self.text(role)]
        header += [self.control["<|channel|>"], *self.text(channel)] if channel else []
        header += [*self.text(" "), self.control["<|constrain|>"], *self.text(content_type)] if content_type else []
        content = self.text(text) if isinstance(text, str) else text
        return [*header, self.control["<|message|>"], *content, self.control[end]]

    def prompt(self, conversation):
        """Returns the token ids of the prompt, and the loss weight of each id."""
        ids, weights = [], []
        start = len(self.assistant)

        def add(message, weight=0.0, unweighted=0):
            """Appends a message. Its first `unweighted` ids get loss weight 0, and all others get `weight`."""
            ids.extend(message)
            weights.extend([0.0] * unweighted + [weight] * (len(message) - unweighted))

        add(self.message("system", system_text(conversation.date, conversation.effort, bool(conversation.tools))))
        if developer := developer_text(conversation.developer, conversation.tools):
            add(self.message("developer", developer))
        for i, turn in enumerate(conversation.turns):
            is_past = i < len(conversation.turns) - 1
            add(self.message("user", turn.user))
            for call in turn.calls:
                keeps_think = bool(call.think) and not is_past  # harmony drops the analyses of earlier turns
                if keeps_think:
                    add(self.message("assistant", thought(call.think, conversation.effort), "analysis"), 1.0, start)
                role = f"assistant to=functions.{call.name}"
                message = self.message(role, call.arguments, "commentary", "<|call|>", "json")
                if keeps_think:
                    weight, unweighted = 1.0, 0
                else:
                    # Only the arguments and <|call|> get a loss weight. Training on the header would teach the model to
                    # call a tool without an analysis.
                    weight, unweighted = PAST_WEIGHT, len(message) - len(self.text(call.arguments)) - 1
                add(message, weight, unweighted)
                add(self.message(f"functions.{call.name} to=assistant", call.result, "commentary"))
            if is_past:
                message = self.message("assistant", turn.answer, "final")
                add(message, PAST_WEIGHT, len(message) - len(self.text(turn.answer)) - 1)
                weights[-1] = 0.0  # <|end|>: the model must end its answers with <|return|> instead
        add(self.assistant)
        return ids, weights

    def completion(self, conversation):
        """Returns the token ids of the last turn's analysis and answer, and the loss weight of each id."""
        turn = conversation.turns[-1]
        analysis = self.message("assistant", thought(turn.think, conversation.effort), "analysis")
        analysis = analysis[len(self.assistant) :]
        pieces = [(self.text(text), weight) for text, weight in turn.pieces or [(turn.answer, 1.0)]]
        final = self.message("assistant", [id for ids, _ in pieces for id in ids], "final", "<|return|>")
        inside = [weight for ids, weight in pieces for _ in ids]
        header = [1.0] * (len(final) - len(inside) - 1)
        return analysis + final, [turn.think_weight] * len(analysis) + header + inside + [1.0]

    def call(self, ids):
        """Returns the name and the arguments of the tool call in a completion, or None if there is no call."""
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        pattern = r"assistant to=functions\.(\S+?)<\|channel\|>commentary <\|constrain\|>json<\|message\|>(.*)"
        match = re.search(pattern, "assistant" + text, re.DOTALL)
        return match and (match[1], match[2])

    def answer(self, ids):
        """Returns the text of the final channel in a completion, or an empty string if there is none."""
        text = after(ids, [*self.text("final"), self.control["<|message|>"]])
        return self.tokenizer.decode(text) if text else ""
