// Tests a server with OpenAI's client for Node.
//
//   node openai_node.mjs URL FULL_URL
//
// The server at URL has the API key `secret` and the model of scripts.json. The server at FULL_URL runs one request at a
// time and has no queue.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponsesFunction, zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, fullUrl] = process.argv.slice(2);
const model = "test/scripted";
const HELLO = "Hello, 世界! Grüße 👋🏽 — ready.";
const ARGUMENTS = { city: "Paris", days: 2 };
const ADA = { name: "Ada Lovelace", born: 1815, topics: ["mathematics", "computing"] };
const Person = z.object({ name: z.string(), born: z.number(), topics: z.array(z.string()) });
const GetWeather = z.object({ city: z.string(), days: z.number() });
const client = new OpenAI({ baseURL: url, apiKey: "secret", maxRetries: 0 });
const tests = new Map();

function test(name, run) {
  tests.set(name, run);
}

function user(content) {
  return { role: "user", content };
}

function chat(text, fields = {}) {
  return { model, messages: [user(text)], ...fields };
}

/** Returns the parts that `pick` selects from a stream, joined. */
async function join(stream, pick) {
  let text = "";
  for await (const event of stream) text += pick(event) ?? "";
  return text;
}

test("models", async () => {
  const { data } = await client.models.list();
  assert.deepEqual(data.map((served) => served.id), [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

test("chat", async () => {
  const answer = await client.chat.completions.create(chat("Say hello"));
  const [{ message, finish_reason }] = answer.choices;
  assert.deepEqual([message.content, finish_reason], [HELLO, "stop"]);
  assert.equal(message.reasoning, "A greeting is enough.");
  assert(answer.usage.completion_tokens_details.reasoning_tokens > 0);
});

test("chat as a stream", async () => {
  const stream = await client.chat.completions.create(chat("Say hello", { stream: true }));
  assert.equal(await join(stream, (chunk) => chunk.choices[0].delta.content), HELLO);
  const helper = client.chat.completions.stream(chat("Say hello"));
  assert.equal(await join(helper, (chunk) => chunk.choices[0].delta.content), HELLO);
  assert.equal(await helper.finalContent(), HELLO);
});

test("chat that is parsed", async () => {
  const request = chat("Describe Ada", { response_format: zodResponseFormat(Person, "person") });
  const answer = await client.chat.completions.parse(request);
  assert.deepEqual(answer.choices[0].message.parsed, ADA);
  const streamed = await client.chat.completions.stream(request).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.parsed, ADA);
});

test("chat with tools", async () => {
  const tool = zodFunction({ name: "get_weather", parameters: GetWeather });
  const question = user("What is the weather in Paris?");
  for (const tool_choice of ["auto", "required", { type: "function", function: { name: "get_weather" } }]) {
    const request = { model, messages: [question], tools: [tool], tool_choice };
    const whole = await client.chat.completions.parse(request);
    const stream = client.chat.completions.stream(request);
    const streamed = await stream.finalChatCompletion();
    for (const { choices } of [whole, streamed]) {
      const [call] = choices[0].message.tool_calls;
      assert.equal(call.function.name, "get_weather");
      assert.deepEqual(call.function.parsed_arguments, ARGUMENTS);
    }
    // The second turn repeats the message, and with it the reasoning.
    const { message } = whole.choices[0];
    assert.equal(message.reasoning, "I need the weather tool.");
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "18 degrees" };
    const second = await client.chat.completions.create({ model, messages: [question, message, result], tools: [tool] });
    assert.equal(second.choices[0].message.content, "It is 18 degrees in Paris today.");
  }
});

test("tools that the client runs", async () => {
  const arguments_ = [];
  const get_weather = {
    type: "function",
    function: {
      name: "get_weather",
      description: "Returns the weather.",
      parse: JSON.parse,
      function: (parsed) => (arguments_.push(parsed), "18 degrees"),
      parameters: { type: "object", properties: { city: { type: "string" }, days: { type: "number" } } },
    },
  };
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools(chat("What is the weather in Paris?", { stream, tools: [get_weather] }));
    assert.equal(await runner.finalContent(), "It is 18 degrees in Paris today.");
  }
  assert.deepEqual(arguments_, [ARGUMENTS, ARGUMENTS]);
});

test("responses", async () => {
  const answer = await client.responses.create({ model, input: "Say hello" });
  assert.equal(answer.output_text, HELLO);
  assert.deepEqual(answer.output.map((item) => item.type), ["reasoning", "message"]);
  assert.equal((await client.responses.retrieve(answer.id)).output_text, HELLO);
  const stream = await client.responses.create({ model, input: "Say hello", stream: true });
  assert.equal(await join(stream, (event) => (event.type === "response.output_text.delta" ? event.delta : "")), HELLO);
  const final = await client.responses.stream({ model, input: "Say hello" }).finalResponse();
  assert.equal(final.output_text, HELLO);
});

test("responses that are parsed", async () => {
  const request = { model, input: "Describe Ada", text: { format: zodTextFormat(Person, "person") } };
  assert.deepEqual((await client.responses.parse(request)).output_parsed, ADA);
  assert.deepEqual((await client.responses.stream(request).finalResponse()).output_parsed, ADA);
});

test("responses with tools", async () => {
  const tools = [zodResponsesFunction({ name: "get_weather", parameters: GetWeather })];
  const question = user("What is the weather in Paris?");
  const request = { model, input: [question], tools };
  const whole = await client.responses.parse(request);
  const stream = client.responses.stream(request);
  const deltas = await join(stream, (event) => (event.type === "response.function_call_arguments.delta" ? event.delta : ""));
  const streamed = await stream.finalResponse();
  assert.equal(deltas, streamed.output.at(-1).arguments);
  for (const { output, id } of [whole, streamed]) {
    const call = output.at(-1);
    assert.deepEqual(call.parsed_arguments, ARGUMENTS);
    const result = { type: "function_call_output", call_id: call.call_id, output: "18 degrees" };
    for (const second of [
      { input: [question, ...output, result] },
      { input: [result], previous_response_id: id },
      { input: [question, { type: "item_reference", id: call.id }, result] },
    ]) {
      const answer = await client.responses.create({ model, tools, ...second });
      assert.equal(answer.output_text, "It is 18 degrees in Paris today.");
    }
  }
});

test("errors", async () => {
  const create = (fields) => client.chat.completions.create(chat("Say hello", fields));
  const wrong = new OpenAI({ baseURL: url, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(wrong.chat.completions.create(chat("Say hello")), OpenAI.AuthenticationError);
  await assert.rejects(create({ model: "other" }), { constructor: OpenAI.NotFoundError, param: "model" });
  await assert.rejects(create({ temperature: -1 }), { constructor: OpenAI.BadRequestError, param: "temperature" });
  await assert.rejects(create({ messages: [user("one two three ".repeat(20000))] }), { code: "context_length_exceeded" });
  await assert.rejects(client.responses.create({ model, input: "Say hello", background: true }), { param: "background" });
  await assert.rejects(client.responses.retrieve("resp_0"), OpenAI.NotFoundError);
});

test("full queue", async () => {
  const full = new OpenAI({ baseURL: fullUrl, apiKey: "none", maxRetries: 0 });
  const endless = chat("Say hello", { stream: true, max_tokens: 20000, ignore_eos: true });
  const busy = await full.chat.completions.create(endless);
  const rejected = full.responses.create({ model, input: "Say hello" });
  await assert.rejects(rejected, (error) => {
    assert.equal(error.constructor, OpenAI.RateLimitError);
    return Number(error.headers.get("retry-after")) >= 1;
  });
  busy.controller.abort();
  const answer = await full.chat.completions.create(chat("Say hello"), { maxRetries: 5 });
  assert.equal(answer.choices[0].message.content, HELLO);
});

for (const [name, run] of tests) {
  try {
    await run();
  } catch (error) {
    console.error(`${name} failed`);
    throw error;
  }
}
