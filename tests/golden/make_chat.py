#!/usr/bin/env python3
"""Writes tests/golden/chat.json, which contains conversations rendered by reference implementations.

    TIKTOKEN_ENCODINGS_BASE=DIR python tests/golden/make_chat.py FIXTURES tests/golden/chat.json
    python tests/golden/make_chat.py FIXTURES --show TEMPLATE CONVERSATION     # prints the rendered text

Requires transformers 5 and openai-harmony. transformers renders the conversations with FIXTURES/chat_templates/*.jinja.
openai-harmony renders the same conversations for gpt-oss and reads o200k_base.tiktoken from DIR.

Each template is under the license of its model, so the output contains only FNV-1a hashes and lengths of the rendered
texts. For harmony, it contains all token ids, because the text that they encode is our own or Apache-licensed.
"""

import copy
import json
import re
import sys
from datetime import datetime
from pathlib import Path

import jinja2
import transformers
from transformers.utils import chat_template_utils

DATE = "2025-06-28"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Gets the weather of a place.\nNever of two.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "City & country, e.g. <Köln>"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "integer", "default": 1},
            },
            "required": ["place"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "get_time", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
}
COMPLEX = {
    "type": "function",
    "function": {
        "name": "kitchen_sink",
        "description": "Everything at once.",
        "parameters": {
            "type": "object",
            "description": "the parameters",
            "properties": {
                "plain": {"type": "string", "title": "PLAIN", "description": "a text", "examples": ["a", "b", 3]},
                "maybe": {"type": "string", "nullable": True, "default": "the default"},
                "either": {"type": ["integer", "string", "null"], "default": 1.5},
                "choice": {
                    "oneOf": [
                        {"type": "string", "default": "x", "description": "a choice"},
                        {"type": "number", "description": "a number", "nullable": True},
                        {"type": "string", "enum": ["p", "q"], "default": "p"},
                    ],
                    "description": "a choice",
                    "default": 20,
                },
                "other": {"oneOf": [{"type": "boolean", "description": "yes or no"}, {"type": "object"}], "default": "q"},
                "list": {"type": "array", "items": {"oneOf": [{"type": "integer"}, {"type": "string", "default": "d"}]}},
                "untyped": {"description": "anything"},
                "bare": {"type": "array"},
                "nested": {
                    "type": "object",
                    "description": "inside",
                    "properties": {"flag": {"type": "boolean", "default": False}, "m": {"type": "object", "properties": {"k": {"enum": ["z"], "type": "string", "default": "z"}}}},
                    "required": ["flag"],
                    "default": {"flag": True, "list": [1, "zwei"]},
                },
            },
            "required": ["plain", "choice"],
        },
    },
}


def call(name, arguments, id="abcdefghi"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM = {"role": "system", "content": "Be brief.\n"}
ASK = {"role": "user", "content": " What is 2 + 2? "}
THINK = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nIt is 4."}
ANSWER = {"role": "assistant", "content": "It is 4."}
REASONED = {"role": "assistant", "content": "It is 4.", "reasoning_content": "Two and two."}
MORE = {"role": "user", "content": "And 9 / 2? «Größe» 中文 🙂 <b>&amp;</b>"}
WANT = {"role": "user", "content": "Weather in Köln?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [call("get_weather", {"place": "Köln", "days": 2})]}
CALL_REASONED = {**CALL, "reasoning_content": "A tool is needed."}
CALL_PREAMBLE = {**CALL_REASONED, "content": "I look it up."}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": '{"sunny": true, "t": 20.5}'}
SUNNY = {"role": "assistant", "content": "Sunny."}

CONVERSATIONS = {
    "user": ([ASK], None),
    "system": ([SYSTEM, ASK], None),
    "developer": ([{"role": "developer", "content": "Be brief."}, ASK], None),
    "turns": ([SYSTEM, ASK, ANSWER, MORE], None),
    "ends-with-answer": ([SYSTEM, ASK, ANSWER], None),
    "think-in-content": ([SYSTEM, ASK, THINK, MORE], None),
    "reasoning": ([SYSTEM, ASK, REASONED, MORE], None),
    "reasoning-last": ([ASK, REASONED], None),
    "tools": ([SYSTEM, WANT], [WEATHER, CLOCK]),
    "tools-no-system": ([WANT], [WEATHER]),
    "tool-schema": ([WANT], [COMPLEX]),
    "tool-call": ([SYSTEM, WANT, CALL, RESULT], [WEATHER]),
    "tool-call-reasoned": ([WANT, CALL_REASONED, RESULT], [WEATHER, CLOCK]),
    "tool-call-preamble": ([WANT, CALL_PREAMBLE, RESULT], [WEATHER]),
    "tool-call-answered": ([SYSTEM, WANT, CALL_REASONED, RESULT, SUNNY, MORE], [WEATHER]),
    "two-calls": (
        [WANT, {**CALL, "tool_calls": [call("get_weather", {"place": "Köln"}), call("get_time", {}, "123456789")]}, RESULT,
         {"role": "tool", "tool_call_id": "123456789", "content": "12:00"}],
        [WEATHER, CLOCK],
    ),
    "bad-order": ([ASK, MORE], None),
}

# The BOS and EOS tokens by the start of the template name. Qwen and SmolLM3 have no BOS token.
TOKENS = {
    "google": ("<bos>", "<eos>"),
    "meta": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "Mistral": ("<s>", "</s>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "microsoft": ("<s>", "<|endoftext|>"),
    "openai": ("<|startoftext|>", "<|return|>"),
    "NousResearch": ("<|begin_of_text|>", "<|im_end|>"),
    "Qwen": (None, "<|im_end|>"),
    "HuggingFaceTB": (None, "<|im_end|>"),
}

# Template name, BOS token and EOS token by zero-based line number in ollama-templates.jsonl.
# Line 2 is TinyLlama, and line 7 is Qwen 2. Mixtral shares a template with Mistral.
LINES = {
    2: ("zephyr", "<s>", "</s>"),
    7: ("chatml", None, "<|im_end|>"),
    10: ("mistral-instruct", "<s>", "</s>"),
    12: ("llama2-chat", "<s>", "</s>"),
    14: ("mistral-instruct", "<s>", "</s>"),
    21: ("gemma-instruct", "<bos>", "<eos>"),
    22: ("llama3-instruct", "<|begin_of_text|>", "<|eot_id|>"),
    26: ("llama2-chat", "<s>", "</s>"),
    27: ("phi-3", "<s>", "<|endoftext|>"),
    28: ("phi-3", "<s>", "<|endoftext|>"),
    29: ("phi-3", "<s>", "<|endoftext|>"),
}


def fnv1a(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


class Pinned(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.fromisoformat(DATE)


def messages_for(source, messages, string_arguments):
    """Returns messages as inferno passes them to a template.

    Reasoning is stored under every key that the template reads. If the template checks for null content, empty content of
    a tool call becomes null.
    """
    out = []
    for message in copy.deepcopy(messages):
        reasoning = message.pop("reasoning_content", None)
        for key in ["reasoning_content", "reasoning", "thinking"]:
            if reasoning is not None and re.search(rf"\b{key}\b", source):
                message[key] = reasoning
        if message["role"] == "developer" and "developer" not in source:
            message["role"] = "system"
        if message.get("tool_calls") and not message["content"] and "content'] is none" in source:
            message["content"] = None
        if string_arguments:
            for tool_call in message.get("tool_calls", []):
                tool_call["function"]["arguments"] = json.dumps(tool_call["function"]["arguments"], ensure_ascii=False)
        out.append(message)
    return out


def tokens_of(path):
    return next(tokens for prefix, tokens in TOKENS.items() if path.name.startswith(prefix))


def render(source, bos, eos, name, add_generation_prompt):
    messages, tools = CONVERSATIONS[name]
    special = {key: token for key, token in [("bos_token", bos), ("eos_token", eos)] if token}
    failure = None
    for string_arguments in [False, True]:
        try:
            rendered, _ = chat_template_utils.render_jinja_template(
                conversations=[messages_for(source, messages, string_arguments)], tools=tools, chat_template=source,
                add_generation_prompt=add_generation_prompt, **special)
            return rendered[0]
        except jinja2.exceptions.UndefinedError:
            failure = failure or {"error": "broken"}
        except jinja2.exceptions.TemplateError:
            return {"error": "refused"}
        except (TypeError, RecursionError):
            failure = failure or {"error": "broken"}
    return failure


def cases(source, bos, eos, names):
    """Renders the conversations. Returns the hash and length of each text, or its error."""
    out = []
    for name in names:
        for add in [True, False]:
            text = render(source, bos, eos, name, add)
            case = {"conversation": name, "add_generation_prompt": add}
            out.append(case | (text if isinstance(text, dict) else {"fnv1a": fnv1a(text), "bytes": len(text.encode())}))
    return {"bos_token": bos, "eos_token": eos, "cases": out}


def line_cases(fixtures):
    """Renders the templates in ollama-templates.jsonl that `LINES` names. Keys are line numbers."""
    lines = (fixtures / "chat_templates" / "ollama-templates.jsonl").read_text().splitlines()
    names = [name for name in CONVERSATIONS if "tool" not in name and name != "two-calls"]
    out = {}
    for number, (kind, bos, eos) in LINES.items():
        [(found, source)] = json.loads(lines[number]).items()
        assert found == kind, f"line {number} is {found}"
        out[str(number)] = {"kind": kind} | cases(source, bos, eos, names)
    return out


def harmony_messages(messages, tools):
    """Converts a conversation to openai-harmony's types as its docs/format.md describes."""
    import openai_harmony as h

    system = h.SystemContent.new().with_reasoning_effort(h.ReasoningEffort.MEDIUM).with_conversation_start_date(DATE)
    out = [h.Message.from_role_and_content(h.Role.SYSTEM, system)]
    messages = list(messages)
    developer = h.DeveloperContent.new()
    if messages[0]["role"] in ("system", "developer"):
        developer = developer.with_instructions(messages.pop(0)["content"])
    if tools:
        functions = [tool["function"] for tool in tools]
        developer = developer.with_function_tools(
            [h.ToolDescription.new(f["name"], f["description"], parameters=f["parameters"]) for f in functions])
    if developer.instructions or tools:
        out.append(h.Message.from_role_and_content(h.Role.DEVELOPER, developer))
    names = {}

    def assistant(text, channel):
        return h.Message.from_role_and_content(h.Role.ASSISTANT, text).with_channel(channel)

    for message in messages:
        if message["role"] == "user":
            out.append(h.Message.from_role_and_content(h.Role.USER, message["content"]))
        elif message["role"] == "assistant":
            calls = message.get("tool_calls", [])
            if message.get("reasoning_content"):
                out.append(assistant(message["reasoning_content"], "analysis"))
            if message["content"]:
                out.append(assistant(message["content"], "commentary" if calls else "final"))
            for one in calls:
                names[one["id"]] = one["function"]["name"]
                arguments = json.dumps(one["function"]["arguments"], ensure_ascii=False)
                out.append(assistant(arguments, "commentary").with_recipient("functions." + one["function"]["name"])
                           .with_content_type("<|constrain|>json"))
        else:
            author = h.Author.new(h.Role.TOOL, "functions." + names[message["tool_call_id"]])
            out.append(h.Message.from_author_and_content(author, message["content"])
                       .with_channel("commentary").with_recipient("assistant"))
    return h.Conversation.from_messages(out)


def harmony_ids(name, add_generation_prompt):
    import openai_harmony as h

    encoding = h.load_harmony_encoding(h.HarmonyEncodingName.HARMONY_GPT_OSS)
    conversation = harmony_messages(*CONVERSATIONS[name])
    if add_generation_prompt:
        return encoding.render_conversation_for_completion(conversation, h.Role.ASSISTANT)
    return encoding.render_conversation(conversation)


SNAPSHOTS = ["Llama-3.1-8B-Instruct", "DeepSeek-R1-Distill-Llama-8B", "TinyLlama-1.1B-Chat-v1.0", "Qwen2.5", "phi-3-mini"]


def snapshot_case(directory, name):
    """Returns the number of token ids that the published tokenizer.json produces, and their hash.

    AutoTokenizer in transformers 5.17 rebuilds a LlamaTokenizerFast instead of using the file.
    For DeepSeek-R1-Distill-Llama, this loses all spaces and newlines.
    """
    text = transformers.AutoTokenizer.from_pretrained(directory).apply_chat_template(
        CONVERSATIONS[name][0], add_generation_prompt=True, tokenize=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    ids = fast(text, add_special_tokens=False)["input_ids"]
    case = {"conversation": name, "add_generation_prompt": True}
    return case | {"tokens": len(ids), "fnv1a": fnv1a(" ".join(map(str, ids)))}


def main():
    fixtures = Path(sys.argv[1])
    chat_template_utils.datetime = Pinned
    if sys.argv[2] == "--show":
        for add in [True, False]:
            if sys.argv[3] == "harmony":
                import openai_harmony as h
                text = h.load_harmony_encoding(h.HarmonyEncodingName.HARMONY_GPT_OSS).decode(harmony_ids(sys.argv[4], add))
            else:
                path = fixtures / "chat_templates" / f"{sys.argv[3]}.jinja"
                text = render(path.read_text(), *tokens_of(path), sys.argv[4], add)
            print(f"=== add_generation_prompt={add}", text, sep="\n")
        return
    files = sorted((fixtures / "chat_templates").glob("*.jinja"))
    templates = {path.stem: cases(path.read_text(), *tokens_of(path), CONVERSATIONS) for path in files}
    harmony = [
        {"conversation": name, "add_generation_prompt": add, "ids": harmony_ids(name, add)}
        for name in CONVERSATIONS for add in [True, False]
    ]
    golden = {
        "made_by": f"tests/golden/make_chat.py, transformers {transformers.__version__}, jinja2 {jinja2.__version__}, openai-harmony 0.0.8",
        "date": DATE,
        "conversations": {name: {"messages": m, "tools": t or []} for name, (m, t) in CONVERSATIONS.items()},
        "templates": templates,
        "lines": line_cases(fixtures),
        "harmony": harmony,
        "snapshots": {d: [snapshot_case(fixtures / d, n) for n in ["user", "turns", "think-in-content"]] for d in SNAPSHOTS},
    }
    Path(sys.argv[2]).write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
