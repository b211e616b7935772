//! Tests of signed receipts and of `inferno receipt`.

use std::fs;
use std::path::Path;

use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::client::{JSON, Server, chat};
use crate::support::program::{assert_fails, run, text};

fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Saves the receipt and the record of a request, and the server's public key. Returns the paths of the three files.
fn save(server: &Server, id: &str, folder: &Path) -> [String; 3] {
    let paths = [format!("/v1/receipts/{id}"), format!("/v1/records/{id}"), "/v1/receipts/key".to_string()];
    let files = ["receipt", "record.json", "key.json"].map(|name| folder.join(name).to_str().unwrap().to_string());
    for (path, file) in paths.iter().zip(&files) {
        let response = server.get(path);
        assert_eq!(response.status, 200, "{}", response.text());
        fs::write(file, response.text()).unwrap();
    }
    files
}

#[test]
fn a_receipt_states_what_computed_an_answer() {
    let folder = TempDir::new().unwrap();
    let key_file = folder.path().join("receipts.pem");
    let server = Server::start(&["--receipt-key", key_file.to_str().unwrap()]);
    let body = chat(json!({ "max_tokens": 8, "n": 2, "seed": 41, "temperature": 0.5 })).to_string();
    let headers = [JSON, ("x-request-id", "r1")];
    assert_eq!(server.send("POST", "/v1/chat/completions", &headers, body.as_bytes()).status, 200);
    assert_eq!(server.get("/v1/receipts/r1").header("content-type"), Some("application/jose"));
    let [receipt, record, key] = &save(&server, "r1", folder.path());
    let output = run(&["receipt", receipt, "--key", key, "--record", record]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let stated: Value = serde_json::from_slice(&output.stdout).unwrap();
    let recorded: Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    for field in ["id", "created", "model", "revision", "engine", "error"] {
        assert_eq!(stated[field], recorded[field], "{field}");
    }
    assert_eq!(
        (&stated["id"], &stated["model"], &stated["chat_format"]),
        (&json!("r1"), &json!("demo"), &json!("harmony"))
    );
    assert!(stated["created"].as_str().unwrap().parse::<jiff::Timestamp>().is_ok(), "{stated}");
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
    let hashes = stated["files"].as_object().unwrap();
    assert_eq!(hashes.len(), 6, "{hashes:?}");
    for (name, hash) in hashes {
        assert_eq!(*hash, sha256(&fs::read(assets.join(name)).unwrap()), "{name}");
    }
    let (stated, recorded) = (&stated["requests"][0], &recorded["requests"][0]);
    assert_eq!((&stated["sampling"]["seed"], &stated["sampling"]["temperature"]), (&json!(41), &json!(0.5)));
    assert_eq!(stated["answers"].as_array().unwrap().len(), 2);
    let mut pairs = vec![(&stated["prompt"], &recorded["request"]["prompt"])];
    pairs.extend((0..2).map(|index| (&stated["answers"][index], &recorded["answers"][index]["tokens"])));
    for (stated, ids) in pairs {
        let ids: Vec<u32> = serde_json::from_value(ids.clone()).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        assert_eq!((&stated["tokens"], &stated["sha256"]), (&json!(ids.len()), &json!(sha256(&bytes))));
    }
    assert_eq!(stated["answers"][1]["finish"], "length");

    // A server that restarts with the same key file keeps its key. A server with another key file has another key.
    let public = fs::read_to_string(key).unwrap();
    drop(server.log());
    let server = Server::start(&["--receipt-key", key_file.to_str().unwrap()]);
    assert_eq!(server.get("/v1/receipts/key").text(), public);
    let other = Server::start(&["--receipt-key", folder.path().join("other.pem").to_str().unwrap()]);
    let other = other.get("/v1/receipts/key").json()["x"].as_str().unwrap().to_string();
    assert_fails(&run(&["receipt", receipt, "--key", &other]), 6, &["changed, or signed with another key"]);

    // Changed and truncated receipts are invalid.
    // The unit tests in `server/records/receipt.rs` change every field and every byte.
    let signed = fs::read_to_string(receipt).unwrap();
    let edited = folder.path().join("edited");
    let edited = edited.to_str().unwrap();
    for (changed, why) in [
        (signed[..signed.len() - 1].to_string(), "not a receipt"),
        (signed.replacen("eyJ2", "eyJ3", 1), "changed"),
        (String::new(), "not a receipt"),
    ] {
        fs::write(edited, changed).unwrap();
        assert_fails(&run(&["receipt", edited, "--key", key]), 6, &[why]);
    }
    fs::write(edited, fs::read_to_string(record).unwrap().replacen("r1", "r2", 1)).unwrap();
    assert_fails(&run(&["receipt", receipt, "--key", key, "--record", edited]), 6, &["does not belong to the record"]);
    assert_fails(&run(&["receipt", receipt, "--key", "abc"]), 2, &["GET /v1/receipts/key"]);
    fs::write(edited, signed + "\n").unwrap();
    assert_eq!(run(&["receipt", edited, "--key", key]).status.code(), Some(0));
}

#[test]
fn a_server_gives_receipts_to_their_clients_only() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("key.pem");
    let flags = ["--receipt-key", file.to_str().unwrap()];
    let server = Server::start(&[&flags[..], &["--api-key", "one", "--api-key", "two"]].concat());
    let (one, two) = (("Authorization", "Bearer one"), ("Authorization", "Bearer two"));
    let body = chat(json!({ "max_tokens": 2 })).to_string();
    let headers = [JSON, one, ("x-request-id", "r1")];
    assert_eq!(server.send("POST", "/v1/chat/completions", &headers, body.as_bytes()).status, 200);
    for (headers, status) in [(&[one][..], 200), (&[two], 404), (&[], 401)] {
        assert_eq!(server.send("GET", "/v1/receipts/r1", headers, b"").status, status);
    }
    server.get("/v1/receipts/key").error(401);
    assert_eq!(server.send("GET", "/v1/receipts/key", &[two], b"").status, 200);
    let secret = fs::read_to_string(&file).unwrap();
    let secret = secret.lines().nth(1).unwrap();
    assert!(!server.send("GET", "/v1/receipts/key", &[two], b"").text().contains(secret));
    let log = server.log();
    assert!(log.contains("/v1/receipts/r1") && !log.contains(secret), "{log}");

    let open = Server::start(&[&flags[..], &["--no-auth"]].concat());
    open.get("/v1/receipts/r1").error(403);
    let without = Server::start(&[]);
    without.get("/v1/receipts/key").error(404);
    without.get("/v1/receipts/r1").error(404);
}
