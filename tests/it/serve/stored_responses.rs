//! Tests of the Responses API: stored responses, earlier items sent back as input, and cancellation.

use std::io::BufReader;

use serde_json::{Value, json};

use super::client::{JSON, Response, Server, read_chunk};
use super::responses::{body, parse_events, respond};

fn tokens(server: &Server, fields: Value) -> u64 {
    server.post("/v1/responses/input_tokens", &body(fields)).ok()["input_tokens"].as_u64().unwrap()
}

#[test]
fn the_previous_response_continues_the_conversation() {
    let server = Server::start(&[]);
    let first = respond(&server, json!({ "instructions": "Be brief.", "max_output_tokens": 200 })).ok();
    let question = json!({ "role": "user", "content": "And on a GPU?" });
    let fields = json!({ "previous_response_id": first["id"], "input": [question] });
    let second = respond(&server, fields.clone()).ok();
    assert_eq!(second["previous_response_id"], first["id"]);
    // Send the same conversation without stored responses, and without the instructions of the first response,
    // which `previous_response_id` does not carry over.
    let output = first["output"].as_array().unwrap();
    let items = [&[json!({ "role": "user", "content": "What is the KV cache?" })], &output[..], &[question]].concat();
    let whole = respond(&server, json!({ "input": items, "store": false })).ok();
    assert_eq!(second["output"][1]["content"], whole["output"][1]["content"]);
    assert_eq!(second["usage"]["input_tokens"], whole["usage"]["input_tokens"]);
    assert_eq!(tokens(&server, fields), second["usage"]["input_tokens"].as_u64().unwrap());
    // References to stored items have the same effect as the items.
    let reference = |item: &Value| json!({ "type": "item_reference", "id": item["id"] });
    let mut referenced = items.clone();
    referenced.splice(1..1 + output.len(), output.iter().map(reference));
    let by_reference = respond(&server, json!({ "input": referenced, "store": false })).ok();
    assert_eq!(by_reference["output"][1]["content"], whole["output"][1]["content"]);
    assert_eq!(by_reference["usage"]["input_tokens"], whole["usage"]["input_tokens"]);
    // Continue the conversation with a third response that refers to the second.
    let third = respond(&server, json!({ "previous_response_id": second["id"], "max_output_tokens": 5 })).ok();
    assert!(third["usage"]["input_tokens"].as_u64() > second["usage"]["input_tokens"].as_u64());
    // If an earlier response was deleted, the conversation cannot continue.
    assert_eq!(
        server.send("DELETE", &format!("/v1/responses/{}", first["id"].as_str().unwrap()), &[], b"").status,
        200
    );
    let error = respond(&server, json!({ "previous_response_id": second["id"] })).error(404);
    assert_eq!(
        (&error["param"], &error["code"]),
        (&json!("previous_response_id"), &json!("previous_response_not_found"))
    );
    let error = respond(&server, json!({ "input": [reference(&output[0])] })).error(404);
    assert_eq!(error["param"], "input[0].id");
}

#[test]
fn responses_are_read_listed_and_deleted() {
    let server = Server::start(&[]);
    let input = json!([
        { "type": "message", "role": "developer", "content": "Be kind." },
        { "type": "message", "id": "msg_mine", "role": "user", "content": [{ "type": "input_text", "text": "Hi" }] },
    ]);
    let response = respond(&server, json!({ "input": input, "max_output_tokens": 5 })).ok();
    let path = format!("/v1/responses/{}", response["id"].as_str().unwrap());
    assert_eq!(server.get(&path).ok(), response);
    // Canceling a response that has ended changes nothing.
    assert_eq!(server.post(&format!("{path}/cancel"), &json!({})).ok(), response);
    let list = server.get(&format!("{path}/input_items")).ok();
    assert_eq!((&list["object"], &list["has_more"]), (&json!("list"), &json!(false)));
    let expected = json!({
        "id": "msg_mine", "type": "message", "status": "completed", "role": "user",
        "content": [{ "type": "input_text", "text": "Hi" }],
    });
    assert_eq!((&list["data"][0], &list["data"][1]["role"]), (&expected, &json!("developer")));
    assert_eq!((&list["first_id"], &list["last_id"]), (&json!("msg_mine"), &list["data"][1]["id"]));
    let list = server.get(&format!("{path}/input_items?order=asc&limit=1")).ok();
    assert_eq!((&list["data"][0]["role"], &list["has_more"]), (&json!("developer"), &json!(true)));
    let after = list["last_id"].as_str().unwrap();
    let list = server.get(&format!("{path}/input_items?order=asc&after={after}")).ok();
    assert_eq!(list["data"], json!([expected]));
    for (query, status) in [("limit=0", 400), ("limit=x", 400), ("order=up", 400), ("after=none", 404)] {
        server.get(&format!("{path}/input_items?{query}")).error(status);
    }
    server.get(&format!("{path}?stream=true")).error(400);
    let deleted = server.send("DELETE", &path, &[], b"").ok();
    assert_eq!(deleted, json!({ "id": response["id"], "object": "response", "deleted": true }));
    for unknown in [path.as_str(), "/v1/responses/resp_none"] {
        let message = server.get(unknown).error(404)["message"].as_str().unwrap().to_string();
        // GET also finds responses in progress, so its error must not say that the response may be in progress.
        assert!(message.contains("unknown or expired") && !message.contains("in progress"), "{message}");
        server.send("DELETE", unknown, &[], b"").error(404);
        server.post(&format!("{unknown}/cancel"), &json!({})).error(404);
        server.get(&format!("{unknown}/input_items")).error(404);
    }
    // A response with `store: false` cannot be read or continued.
    let response = respond(&server, json!({ "store": false, "max_output_tokens": 5 })).ok();
    assert_eq!(response["store"], false);
    server.get(&format!("/v1/responses/{}", response["id"].as_str().unwrap())).error(404);
    respond(&server, json!({ "previous_response_id": response["id"] })).error(404);
}

#[test]
fn clients_cannot_read_the_responses_of_others() {
    let server = Server::start(&["--api-key", "a", "--api-key", "b"]);
    let send = |key: &str, method: &str, path: &str, body: &Value| {
        let key = format!("Bearer {key}");
        server.send(method, path, &[JSON, ("Authorization", &key)], body.to_string().as_bytes())
    };
    let response = send("a", "POST", "/v1/responses", &body(json!({ "max_output_tokens": 5 }))).ok();
    let path = format!("/v1/responses/{}", response["id"].as_str().unwrap());
    assert_eq!(send("a", "GET", &path, &json!({})).status, 200);
    send("b", "GET", &path, &json!({})).error(404);
    send("b", "DELETE", &path, &json!({})).error(404);
    let reference = json!([{ "type": "item_reference", "id": response["output"][0]["id"] }]);
    send("b", "POST", "/v1/responses", &body(json!({ "input": reference }))).error(404);
    send("b", "POST", "/v1/responses", &body(json!({ "previous_response_id": response["id"] }))).error(404);
    for (method, path) in [
        ("POST", "/v1/responses".to_string()),
        ("POST", "/v1/responses/input_tokens".to_string()),
        ("GET", path.clone()),
        ("DELETE", path.clone()),
        ("POST", format!("{path}/cancel")),
        ("GET", format!("{path}/input_items")),
    ] {
        send("wrong", method, &path, &json!({})).error(401);
    }
}

#[test]
fn tool_calls_and_their_outputs_reach_the_model() {
    let server = Server::start(&[]);
    let function = json!({ "name": "find", "description": "Finds.", "parameters": { "type": "object" } });
    let mut tool = function.clone();
    tool["type"] = json!("function");
    let input = json!([
        { "role": "user", "content": "Which models are there?" },
        { "type": "reasoning", "id": "rs_1", "summary": [], "content": [{ "type": "reasoning_text", "text": "Call it." }] },
        { "type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "find", "arguments": "{\"q\": 1}", "status": "completed" },
        { "type": "function_call", "call_id": "call_2", "name": "find", "arguments": "{}" },
        { "type": "function_call_output", "call_id": "call_1", "output": "demo" },
        { "type": "function_call_output", "call_id": "call_2", "output": [{ "type": "input_text", "text": "none" }] },
    ]);
    let response = respond(&server, json!({ "input": input, "tools": [tool] }));
    assert_eq!(response.header("x-inferno-ignored"), None);
    let json = response.ok();
    // Send the same conversation as a chat completion.
    let call = |id: &str, arguments: &str| json!({ "id": id, "type": "function", "function": { "name": "find", "arguments": arguments } });
    let messages = json!([
        { "role": "user", "content": "Which models are there?" },
        { "role": "assistant", "reasoning": "Call it.", "tool_calls": [call("call_1", "{\"q\": 1}"), call("call_2", "{}")] },
        { "role": "tool", "tool_call_id": "call_1", "content": "demo" },
        { "role": "tool", "tool_call_id": "call_2", "content": "none" },
    ]);
    let tools = json!([{ "type": "function", "function": function }]);
    let chat = server.chat(json!({ "messages": messages, "tools": tools })).ok();
    assert_eq!(json["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    let text = &json["output"].as_array().unwrap().iter().find(|item| item["type"] == "message").unwrap()["content"][0]
        ["text"];
    assert_eq!(*text, chat["choices"][0]["message"]["content"]);
    // A function output may refer to a call in the stored conversation.
    let fields = json!({ "input": input.as_array().unwrap()[..4], "tools": [tool], "max_output_tokens": 5 });
    let first = respond(&server, fields).ok();
    let output = json!([{ "type": "function_call_output", "call_id": "call_1", "output": "demo" }]);
    respond(&server, json!({ "previous_response_id": first["id"], "input": output, "max_output_tokens": 5 })).ok();
    // If a function output has no call, the error gives the index of the output in the request's `input`.
    // The items of the stored conversation do not count.
    let input = json!([
        output[0],
        { "role": "user", "content": "And then?" },
        { "type": "function_call_output", "call_id": "call_9", "output": "" },
    ]);
    let error = respond(&server, json!({ "previous_response_id": first["id"], "input": input })).error(400);
    assert_eq!(error["param"], "input[2].call_id", "{error}");
}

#[test]
fn reasoning_comes_back_in_either_field() {
    let server = Server::start(&[]);
    let question = json!({ "role": "user", "content": "What is the KV cache?" });
    let call = json!({ "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}" });
    let output = json!({ "type": "function_call_output", "call_id": "c", "output": "ok" });
    let count = |reasoning: Value| {
        let input = json!([question, reasoning, call, output]);
        tokens(&server, json!({ "input": input }))
    };
    let first = respond(&server, json!({ "include": ["reasoning.encrypted_content"], "store": false })).ok();
    let item = &first["output"][0];
    let encoded = json!({ "type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"] });
    let shown = json!({ "type": "reasoning", "summary": [], "content": item["content"] });
    let none = json!({ "type": "reasoning", "summary": [] });
    assert_eq!(count(encoded), count(shown.clone()));
    assert!(count(shown) > count(none));
    let foreign = json!({ "type": "reasoning", "summary": [], "encrypted_content": "gAAAAA" });
    let response = respond(&server, json!({ "input": [question, foreign, call, output], "max_output_tokens": 3 }));
    assert_eq!(response.header("x-inferno-ignored"), Some("input[].encrypted_content (of another service)"));
}

#[test]
fn a_running_response_can_be_canceled() {
    let server = Server::start(&["--max-sequences", "1"]);
    let endless = body(json!({ "stream": true, "ignore_eos": true, "max_output_tokens": 3000 }));
    // Start two responses: one that runs, and one that waits in the queue.
    let mut streams = Vec::new();
    for _ in 0..2 {
        let mut stream = BufReader::new(server.begin("/v1/responses", &endless));
        assert_eq!(Response::read_head(&mut stream).status, 200);
        let text = read_chunk(&mut stream).unwrap();
        let created = String::from_utf8(text.clone()).unwrap();
        let created: Value =
            serde_json::from_str(created.lines().nth(1).unwrap().strip_prefix("data: ").unwrap()).unwrap();
        let id = created["response"]["id"].as_str().unwrap().to_string();
        streams.push((stream, text, id));
    }
    server.wait("the first response is running", |server| server.metric("inferno_num_requests_running") == 1.0);
    let response = |id: &str| server.get(&format!("/v1/responses/{id}")).ok();
    let first_text = |response: &Value| response["output"][0]["content"][0]["text"].as_str().map(str::to_string);
    server.wait("the first response has text", |_| first_text(&response(&streams[0].2)).is_some());
    let partial = response(&streams[0].2);
    assert_eq!((&partial["status"], &partial["usage"]), (&json!("in_progress"), &Value::Null));
    assert_eq!(response(&streams[1].2)["output"], json!([]));
    for (index, (mut stream, mut text, id)) in streams.into_iter().enumerate().rev() {
        assert_eq!(response(&id)["status"], "in_progress");
        let path = format!("/v1/responses/{id}");
        for error in [server.send("DELETE", &path, &[], b""), server.get(&format!("{path}/input_items"))] {
            assert!(error.error(404)["message"].as_str().unwrap().contains("in progress"));
        }
        let canceled = server.post(&format!("/v1/responses/{id}/cancel"), &json!({})).ok();
        assert_eq!((&canceled["id"], &canceled["status"]), (&json!(id), &json!("cancelled")));
        while let Some(chunk) = read_chunk(&mut stream) {
            text.extend(chunk);
        }
        let events = parse_events(&String::from_utf8(text).unwrap());
        let last = events.last().unwrap();
        assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.incomplete"), &json!("cancelled")));
        assert_eq!(response(&id), last["response"]);
        if index == 0 {
            let whole = &last["response"];
            assert_eq!(partial["output"][0]["id"], whole["output"][0]["id"]);
            assert!(
                first_text(whole).unwrap().starts_with(&first_text(&partial).unwrap()),
                "the text of {whole} does not start with the text of {partial}"
            );
        }
    }
    server.wait_until_idle();
    // If the client of a streamed response disconnects, the response is canceled.
    let mut stream = BufReader::new(server.begin("/v1/responses", &endless));
    Response::read_head(&mut stream);
    read_chunk(&mut stream).unwrap();
    drop(stream);
    server.wait_until_idle();
}
