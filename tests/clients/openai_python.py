"""Tests a server with OpenAI's Python client.

    openai_python.py URL FULL_URL

The server at URL has the API key `secret` and the model of scripts.json. The server at FULL_URL runs one request at a
time and has no queue.
"""

import asyncio
import json
import sys

import openai
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from pydantic import BaseModel

URL, FULL_URL = sys.argv[1:]
MODEL = "test/scripted"
HELLO = "Hello, 世界! Grüße 👋🏽 — ready."
ARGUMENTS = {"city": "Paris", "days": 2}
client = OpenAI(base_url=URL, api_key="secret", max_retries=0)


class GetWeather(BaseModel):
    city: str
    days: int


class Person(BaseModel):
    name: str
    born: int
    topics: list[str]


ADA = Person(name="Ada Lovelace", born=1815, topics=["mathematics", "computing"])
CHAT_TOOL = pydantic_function_tool(GetWeather, name="get_weather")
TOOL = {"type": "function", **CHAT_TOOL["function"]}
LENIENT_CHAT_TOOL = {"type": "function", "function": CHAT_TOOL["function"] | {"strict": False}}


def user(text):
    return {"role": "user", "content": text}


def chat(text, **fields):
    return {"model": MODEL, "messages": [user(text)], **fields}


def response(text, **fields):
    return {"model": MODEL, "input": text, **fields}


def raises(kind, call, **expected):
    """Calls a function that must fail, and compares attributes of the error."""
    try:
        call()
    except kind as error:
        assert type(error) is kind, type(error)
        for name, value in expected.items():
            assert getattr(error, name) == value, f"{name}: {getattr(error, name)!r} instead of {value!r}"
        return error
    raise AssertionError(f"no {kind.__name__}")


def test_models():
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_chat():
    answer = client.chat.completions.create(**chat("Say hello"))
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (HELLO, "stop")
    assert choice.message.reasoning == "A greeting is enough."
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens
    assert answer._request_id.startswith("req-")


def test_chat_options():
    answer = client.chat.completions.create(**chat("Say hello", n=2, stop=["Grüße"], user="somebody"))
    assert [choice.message.content for choice in answer.choices] == ["Hello, 世界! "] * 2
    answer = client.chat.completions.create(**chat("Count to nine", max_completion_tokens=5))
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 5
    raw = client.chat.completions.with_raw_response.create(**chat("Say hello", user="somebody"))
    assert raw.headers["x-inferno-ignored"] == "user"


def test_chat_stream():
    chunks = list(client.chat.completions.create(**chat("Say hello", stream=True, stream_options={"include_usage": True})))
    *answer, last = chunks
    assert last.choices == [] and last.usage.completion_tokens > 0
    deltas = [chunk.choices[0].delta for chunk in answer]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == HELLO
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "A greeting is enough."
    assert [chunk.choices[0].finish_reason for chunk in answer if chunk.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_stream_helper():
    with client.chat.completions.stream(**chat("Say hello")) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert text == stream.get_final_completion().choices[0].message.content == HELLO


def test_chat_parse():
    answer = client.chat.completions.parse(**chat("Describe Ada", response_format=Person))
    assert answer.choices[0].message.parsed == ADA
    with client.chat.completions.stream(**chat("Describe Ada", response_format=Person)) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == ADA


def test_chat_logprobs():
    answer = client.chat.completions.create(**chat("Count to nine", logprobs=True, top_logprobs=2))
    [choice] = answer.choices
    content = choice.logprobs.content
    assert "".join(token.token for token in content) == choice.message.content
    assert bytes(byte for token in content for byte in token.bytes).decode() == choice.message.content
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in content)


def test_chat_tools():
    for is_stream in (False, True):
        for choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
            request = chat("What is the weather in Paris?", tools=[CHAT_TOOL], tool_choice=choice, parallel_tool_calls=False)
            if is_stream:
                with client.chat.completions.stream(**request) as stream:
                    arguments = "".join(
                        event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"
                    )
                    message = stream.get_final_completion().choices[0].message
                assert arguments == message.tool_calls[0].function.arguments
            else:
                message = client.chat.completions.parse(**request).choices[0].message
            [call] = message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
            assert call.function.parsed_arguments == GetWeather(**ARGUMENTS)

        # The second turn repeats the reasoning.
        echo = message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        for name in ("reasoning", "reasoning_content"):
            turns = [*request["messages"], echo | {name: message.reasoning}]
            turns += [{"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}]
            answer = client.chat.completions.create(model=MODEL, messages=turns, tools=[CHAT_TOOL])
            content = answer.choices[0].message.content
            assert content == "It is 18 degrees in Paris today."
            turns += [{"role": "assistant", "content": content}, user("And tomorrow?")]
            answer = client.chat.completions.create(model=MODEL, messages=turns, tools=[CHAT_TOOL])
            assert answer.choices[0].message.content == "Tomorrow it will rain."


def test_chat_two_calls():
    question = user("Compare Rome and Oslo.")
    for tool in (CHAT_TOOL, LENIENT_CHAT_TOOL):
        request = {"model": MODEL, "messages": [question], "tools": [tool]}
        message = client.chat.completions.create(**request).choices[0].message
        assert message.content == "I look up both."
        arguments = [call.function.arguments for call in message.tool_calls]
        assert [json.loads(text)["city"] for text in arguments] == ["Rome", "Oslo"]
        parts = ["", ""]
        for chunk in client.chat.completions.create(**request, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                parts[call.index] += call.function.arguments
        assert parts == arguments
        single = client.chat.completions.create(**request, parallel_tool_calls=False).choices[0].message
        assert [call.function.arguments for call in single.tool_calls] == arguments[:1]
    echo = message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": content}
        for call, content in zip(message.tool_calls, ["22 in Rome", "9 in Oslo"])
    ]
    answer = client.chat.completions.create(model=MODEL, messages=[question, echo, *results], tools=[CHAT_TOOL])
    assert answer.choices[0].message.content == "Rome is warmer."


def test_responses():
    answer = client.responses.create(**response("Say hello", instructions="Be brief."))
    assert (answer.output_text, answer.status) == (HELLO, "completed")
    reasoning, message = answer.output
    assert [part.text for part in reasoning.content] == ["A greeting is enough."]
    assert message.role == "assistant"
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    assert client.responses.retrieve(answer.id).output_text == HELLO
    assert client.responses.input_items.list(answer.id).data[0].content[0].text == "Say hello"
    client.responses.delete(answer.id)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(answer.id))
    count = client.responses.input_tokens.count(model=MODEL, input="Say hello", instructions="Be brief.")
    assert count.input_tokens == answer.usage.input_tokens


def test_responses_stream():
    events = list(client.responses.create(**response("Say hello", stream=True)))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == HELLO
    # This helper raises if an event is missing or out of order.
    with client.responses.stream(**response("Say hello")) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == HELLO


def test_responses_parse():
    assert client.responses.parse(**response("Describe Ada", text_format=Person)).output_parsed == ADA
    with client.responses.stream(**response("Describe Ada", text_format=Person)) as stream:
        assert stream.get_final_response().output_parsed == ADA


def test_responses_tools():
    question, output = "What is the weather in Paris?", "18 degrees"
    for is_stream in (False, True):
        for choice in ("auto", "required", {"type": "function", "name": "get_weather"}):
            request = response(question, tools=[TOOL], tool_choice=choice)
            if is_stream:
                with client.responses.stream(**request) as stream:
                    arguments = "".join(
                        event.delta for event in stream if event.type == "response.function_call_arguments.delta"
                    )
                    answer = stream.get_final_response()
            else:
                answer = client.responses.create(**request)
            call = answer.output[-1]
            assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", ARGUMENTS)
            assert not is_stream or arguments == call.arguments

        # The second turn repeats all items, the reasoning among them, or refers to the stored response.
        result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
        items = [user(question), *answer.output, result]
        for second in (
            client.responses.create(model=MODEL, input=items, tools=[TOOL]),
            client.responses.create(model=MODEL, input=[result], previous_response_id=answer.id, tools=[TOOL]),
            client.responses.create(model=MODEL, input=[result], previous_response_id=answer.id),
        ):
            assert second.output_text == "It is 18 degrees in Paris today."


def test_responses_two_calls():
    with client.responses.stream(**response("Compare Rome and Oslo.", tools=[TOOL])) as stream:
        answer = stream.get_final_response()
    message, *calls = answer.output
    assert message.content[0].text == "I look up both."
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Rome", "Oslo"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": output}
        for call, output in zip(calls, ["22 in Rome", "9 in Oslo"])
    ]
    second = client.responses.create(model=MODEL, input=results, previous_response_id=answer.id)
    assert second.output_text == "Rome is warmer."


def test_encrypted_reasoning():
    request = {"model": MODEL, "store": False, "include": ["reasoning.encrypted_content"], "tools": [TOOL]}
    question = user("What is the weather in Paris?")
    answer = client.responses.create(**request, input=[question])
    reasoning, call = answer.output
    assert reasoning.encrypted_content
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    second = client.responses.create(**request, input=[question, *answer.output, result])
    assert second.output_text == "It is 18 degrees in Paris today."


def test_completions():
    prompt = "<|start|>user<|message|>Count to nine<|end|><|start|>assistant<|channel|>final<|message|>"
    whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=100).choices[0].text
    stream = client.completions.create(model=MODEL, prompt=prompt, max_tokens=100, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole


def test_errors():
    create, hello = client.chat.completions.create, chat("Say hello")
    wrong = OpenAI(base_url=URL, api_key="wrong", max_retries=0)
    raises(openai.AuthenticationError, lambda: wrong.chat.completions.create(**hello), status_code=401)
    error = raises(openai.NotFoundError, lambda: create(**(hello | {"model": "other"})), status_code=404, param="model")
    assert MODEL in error.message
    bad = openai.BadRequestError
    raises(bad, lambda: create(**hello, temperature=-1), status_code=400, param="temperature")
    raises(bad, lambda: create(**hello, extra_body={"guided_json": {}}), param="guided_json")
    raises(bad, lambda: create(**hello, functions=[{"name": "f"}]), param="functions")
    raises(bad, lambda: client.responses.create(**response("Say hello", background=True)), param="background")
    too_long = "one two three " * 20000
    raises(bad, lambda: create(**chat(too_long)), code="context_length_exceeded")
    raises(bad, lambda: client.responses.create(**response(too_long)), code="context_length_exceeded")
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    error = raises(bad, lambda: create(model=MODEL, messages=[user(image)]))
    assert error.param.startswith("messages"), error.param


async def ask_at_once(count):
    async with AsyncOpenAI(base_url=URL, api_key="secret", max_retries=0) as several:

        async def ask():
            stream = await several.chat.completions.create(**chat("Say hello", stream=True))
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        return await asyncio.gather(*(ask() for _ in range(count)))


def test_many_at_once():
    assert asyncio.run(ask_at_once(20)) == [HELLO] * 20


def test_full_queue():
    full = OpenAI(base_url=FULL_URL, api_key="none", max_retries=0)
    endless = chat("Say hello", stream=True, max_tokens=20000, extra_body={"ignore_eos": True})
    with full.chat.completions.create(**endless) as stream:
        next(iter(stream))
        for call in (
            lambda: full.chat.completions.create(**chat("Say hello")),
            lambda: full.responses.create(**response("Say hello")),
        ):
            error = raises(openai.RateLimitError, call, status_code=429)
            assert int(error.response.headers["retry-after"]) >= 1
    # The answer above is canceled. The client repeats the request until the server has room.
    answer = full.with_options(max_retries=5).chat.completions.create(**chat("Say hello"))
    assert answer.choices[0].message.content == HELLO


for name, test in list(globals().items()):
    if name.startswith("test_"):
        try:
            test()
        except BaseException:
            print(f"{name} failed", file=sys.stderr)
            raise
