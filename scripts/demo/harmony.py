"""Renders conversations as token ids in gpt-oss's chat format, and trains the small tokenizer."""

import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = [
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>",
    "<|start|>", "<|end|>", "<|message|>", "<|call|>",
]  # fmt: skip
STOP = ["<|return|>", "<|endoftext|>", "<|call|>"]

# The pattern that splits text before byte-pair encoding: o200k's pattern, except that every digit is a separate piece.
SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def system_text(date, effort):
    return (
        "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
        f"Current date: {date}\n\nReasoning: {effort}\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    )


def thought(think, effort):
    """Returns the analysis. For low effort, returns only the part before the first colon or semicolon."""
    return re.split(r"[:;]", think)[0].rstrip(".") + "." if effort == "low" else think


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
        self.known = {}  # a cache, because many answers and analyses occur repeatedly

    def text(self, text):
        if text not in self.known:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(self.known) > 20_000:
                self.known.clear()
            self.known[text] = ids
        return self.known[text]

    def message(self, role, text, channel="", end="<|end|>"):
        channel_ids = [self.control["<|channel|>"], *self.text(channel)] if channel else []
        return [
            self.control["<|start|>"], *self.text(role), *channel_ids,
            self.control["<|message|>"], *self.text(text), self.control[end],
        ]  # fmt: skip

    def prompt(self, conversation):
        """Returns the token ids of the prompt, and for each id whether it is part of an earlier answer."""
        ids, answers = self.message("system", system_text(conversation.date, conversation.effort)), []
        if conversation.developer:
            ids += self.message("developer", f"# Instructions\n\n{conversation.developer}\n\n")
        for i, turn in enumerate(conversation.turns):
            if i > 0:  # only the answers of earlier turns are kept
                past = conversation.turns[i - 1].answer
                ids += self.message("assistant", past, "final")
                answers.append(range(len(ids) - len(self.text(past)) - 1, len(ids) - 1))
            ids += self.message("user", turn.user)
        ids += [self.control["<|start|>"], *self.text("assistant")]
        past_answer = [False] * len(ids)
        for span in answers:
            past_answer[span.start : span.stop] = [True] * len(span)
        return ids, past_answer

    def completion(self, conversation):
        """Returns the token ids of the completion: the analysis and the answer."""
        turn = conversation.turns[-1]
        analysis = self.message("assistant", thought(turn.think, conversation.effort), "analysis")
        start = 1 + len(self.text("assistant"))  # the prompt ends with these tokens
        return analysis[start:] + self.message("assistant", turn.answer, "final", end="<|return|>")

    def answer(self, ids):
        """Returns the text of the final channel in a completion, or an empty string if there is none."""
        for i, id in enumerate(ids):
            if id == self.control["<|message|>"] and ids[: i][-len(self.text("final")) :] == self.text("final"):
                return self.tokenizer.decode(ids[i + 1 :])
        return ""
