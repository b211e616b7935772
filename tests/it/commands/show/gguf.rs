//! Tests of `inferno show` for GGUF models on the hub.
//! The command fetches only the beginning of each GGUF file, which contains the header, and the RoPE factors.

use inferno::weights::ggml::GgmlType;
use serde_json::{Value, json};

use super::{command, remote, show};
use crate::support::fake_hub::{COMMIT, FakeHub, REPO};
use crate::support::gguf::converter::convert;
use crate::support::gguf::models::quantized_llama;
use crate::support::gguf::writer::Writer;
use crate::support::golden;
use crate::support::program::{assert_fails, text};

const MB: usize = 1 << 20;

/// Returns a writer for a GGUF file of a tiny model with Llama 3's RoPE factors, a license and a chat template.
fn llama() -> Writer {
    let llama = convert(&golden("llama3")).string("general.license", "llama3.2");
    llama.string("tokenizer.chat_template", "{{ messages }}")
}

/// Adds about `bytes` bytes to the header.
fn with_long_header(writer: Writer, bytes: usize) -> Writer {
    writer.strings("filler", &vec!["x".repeat(992); bytes / 1000])
}

fn show_remote(fake: &FakeHub, model: &str) -> Value {
    let home = tempfile::tempdir().unwrap();
    let output = crate::support::program::inferno(&home)
        .env("HF_ENDPOINT", fake.endpoint())
        .args(["show", model, "--remote", "--json"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!home.path().join("models").exists(), "show --remote wrote to the cache");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the byte ranges that were requested from GGUF files, as `name first-last`.
fn ranges(fake: &FakeHub) -> Vec<String> {
    let ranges =
        fake.take_heads().into_iter().filter(|head| head.lines().next().unwrap().contains(".gguf ")).map(|head| {
            let path = head.split(' ').nth(1).unwrap();
            let range =
                head.lines().find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_string));
            format!("{} {}", path.rsplit('/').next().unwrap(), range.expect("a GGUF request has no Range header"))
        });
    ranges.collect()
}

#[test]
fn remote_file_gives_the_same_report_as_a_local_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny-Q4_K_M.gguf");
    std::fs::write(&path, llama().bytes()).unwrap();
    let local = show(&[path.to_str().unwrap()]);
    let files: &[(&str, &[u8])] = &[
        ("README.md", b"---\nlicense: other\n---\n"),
        ("config.json", b"{}"),
        ("mmproj-F16.gguf", b""),
        ("tiny-Q4_K_M.gguf", &llama().bytes()),
    ];
    let fake = FakeHub::start(files);
    let remote_model = show_remote(&fake, REPO);
    assert_eq!((&remote_model["revision"], &remote_model["path"]), (&json!(COMMIT), &Value::Null));
    assert_eq!(remote_model["supported"], true, "{}", remote_model["reason"]);
    assert_eq!(
        (&remote_model["license"], &remote_model["chat"]),
        (&json!("llama3.2"), &json!("tokenizer.chat_template"))
    );
    for (field, value) in local.as_object().unwrap() {
        // The free memory of a GPU may change between the two runs of `show`.
        let changes = !local["gpu"].is_null() && ["gpu", "needs"].contains(&field.as_str());
        if !changes && !["name", "revision", "path"].contains(&field.as_str()) {
            assert_eq!(&remote_model[field], value, "{field}");
        }
    }
    let lines = fake.take_lines();
    assert!(lines.iter().all(|line| !line.contains("config.json")), "{lines:?}");

    // The memory needs of a quantized model must also agree, although its file is larger than the first request.
    let quantized = quantized_llama(GgmlType::Q8_0, false).bytes();
    assert!(quantized.len() > MB);
    std::fs::write(&path, &quantized).unwrap();
    let (local, remote_model) =
        (show(&[path.to_str().unwrap()]), show_remote(&FakeHub::start(&[("a.gguf", &quantized)]), REPO));
    assert!(remote_model["needs"].is_object());
    for field in ["needs", "tensors", "quantization", "weight_bytes", "parameters"] {
        assert_eq!(remote_model[field], local[field], "{field}");
    }
}

#[test]
fn header_is_read_until_it_is_complete() {
    let small = llama().bytes().len();
    // Each case is (bytes added to the header, expected byte ranges, bytes added to the tensor data).
    let cases = [
        (0, vec![format!("0-{}", small - 1)], 0),
        (3 * MB / 2, vec![format!("0-{}", MB - 1), format!("{MB}-{}", 4 * MB - 1)], 8 * MB),
        (
            5 * MB,
            vec![format!("0-{}", MB - 1), format!("{MB}-{}", 4 * MB - 1), format!("{}-{}", 4 * MB, 16 * MB - 1)],
            16 * MB,
        ),
    ];
    for (filler, expected, data) in cases {
        let writer = if filler == 0 { llama() } else { with_long_header(llama(), filler).data(data) };
        for supports_ranges in [true, false] {
            let fake = FakeHub::start(&[("tiny.gguf", &writer.bytes())]);
            fake.change(|world| world.supports_ranges = supports_ranges);
            let model = show_remote(&fake, REPO);
            assert_eq!((&model["supported"], &model["layers"]), (&json!(true), &json!(3)), "{}", model["reason"]);
            let expected: Vec<String> = expected.iter().map(|range| format!("tiny.gguf {range}")).collect();
            assert_eq!(ranges(&fake), expected);
            // A server without range support may send more than requested before inferno closes the connection.
            let last: usize = expected.last().unwrap().rsplit_once('-').unwrap().1.parse().unwrap();
            let sent = fake.state.lock().unwrap().sent_bytes;
            assert!(
                !supports_ranges || sent == last + 1,
                "the server sent {sent} bytes, not exactly the requested ranges"
            );
        }
    }
}

/// In GGUF, Llama 3's RoPE factors are a small tensor that may be anywhere in the tensor data.
/// `show --remote` must fetch the bytes of this tensor, but no other tensor data beyond the first MiB of the file.
#[test]
fn rope_factors_are_fetched_from_the_tensor_data() {
    let head = 20_000;
    let writer = with_long_header(llama(), MB - head);
    let fake = FakeHub::start(&[("tiny.gguf", &writer.bytes())]);
    let model = show_remote(&fake, REPO);
    assert_eq!(model["supported"], true, "{}", model["reason"]);
    assert_eq!(model["rope"]["scaling"], "longrope");
    let ranges = ranges(&fake);
    assert_eq!((ranges.len(), ranges[0].as_str()), (2, "tiny.gguf 0-1048575"), "{ranges:?}");
    let (first, last) = ranges[1].rsplit_once(' ').unwrap().1.split_once('-').unwrap();
    let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
    assert!(first > MB && last - first < 100, "{ranges:?}");
}

#[test]
fn one_of_several_models_is_chosen_by_name() {
    let q4 = llama().bytes();
    let files: &[(&str, &[u8])] = &[
        ("tiny-Q4_K_M.gguf", &q4),
        ("Q8_0/tiny-Q8_0-00001-of-00002.gguf", b"GGUF"),
        ("Q8_0/tiny-Q8_0-00002-of-00002.gguf", b"GGUF"),
        ("README.md", b""),
    ];
    let fake = FakeHub::start(files);
    let list = [&format!("inferno show {REPO}:Q4_K_M --remote")[..], &format!("inferno show {REPO}:Q8_0 --remote")];
    assert_fails(&remote(&fake, &[]), 2, &["several GGUF models", list[0], list[1]]);
    assert!(ranges(&fake).is_empty(), "inferno read a GGUF file before a model was selected");
    let model = show_remote(&fake, &format!("{REPO}:q4_k_m"));
    assert_eq!((&model["name"], &model["layers"]), (&json!(format!("{REPO}:q4_k_m")), &json!(3)));
    assert_eq!(model["files"], json!([{"name": "tiny-Q4_K_M.gguf", "bytes": q4.len()}]));
    assert!(ranges(&fake).iter().all(|range| range.starts_with("tiny-Q4_K_M.gguf ")));

    let home = tempfile::tempdir().unwrap();
    let show_named = |model: &str| {
        let args = ["show", model, "--remote"];
        crate::support::program::inferno(&home).env("HF_ENDPOINT", fake.endpoint()).args(args).output().unwrap()
    };
    assert_fails(&show_named(&format!("{REPO}:Q2_K")), 3, &["has these GGUF models", list[0], list[1]]);
    fake.change(|world| world.files.retain(|name, _| name == "README.md"));
    assert_fails(&show_named(&format!("{REPO}:Q2_K")), 3, &["has no GGUF model, only 'README.md'"]);
    // The error for a missing model suggests `show --remote` and `download`.
    let hints = ["inferno show org/name:Q2_K --remote", "inferno download org/name:Q2_K"];
    assert_fails(&crate::support::program::run(&["show", "org/name:Q2_K"]), 3, &hints);
}

#[test]
fn all_parts_of_a_split_model_are_read() {
    let tensors = llama().tensors.0 as u32;
    let split = |writer: Writer, number: u32, tensors: u32| {
        writer.u32("split.no", number).u32("split.count", 2).u32("split.tensors.count", tensors)
    };
    let (rows, columns) = (137, 80);
    let head = vec![0; rows * columns * 4];
    let second = |tensors| {
        let shape = [columns as u64, rows as u64];
        split(Writer::new(), 1, tensors).tensor("output.weight", &shape, 0, &head).bytes()
    };
    let whole = show_remote(&FakeHub::start(&[("tiny.gguf", &llama().bytes())]), REPO);
    let parts = ["q/t-00001-of-00002.gguf", "q/t-00002-of-00002.gguf"];
    let fake = FakeHub::start(&[(parts[0], &split(llama(), 0, tensors + 1).bytes()), (parts[1], &second(tensors + 1))]);
    let model = show_remote(&fake, REPO);
    assert_eq!(model["supported"], true, "{}", model["reason"]);
    let parameters = |model: &Value| model["parameters"].as_u64().unwrap();
    assert_eq!(parameters(&model), parameters(&whole) + (rows * columns) as u64);
    assert_eq!(model["files"].as_array().unwrap().len(), 2);
    assert_eq!(ranges(&fake).len(), 2);

    fake.change(|world| drop(world.files.insert(parts[1].into(), second(tensors))));
    let model = show_remote(&fake, REPO);
    assert!(model["weights_problem"].as_str().unwrap().contains("belongs to another model"));
    fake.change(|world| drop(world.files.remove(parts[1])));
    assert_fails(&remote(&fake, &[]), 1, &["lacks 'q/t-00002-of-00002.gguf'"]);
}

/// If a GGUF file on the hub is broken, `show` succeeds, and the report names the problem. If a request fails, `show`
/// fails.
#[test]
fn broken_headers_are_reported() {
    let long = Writer::new().raw("filler", 8, (80u64 << 20).to_le_bytes()).data(90 << 20).bytes();
    let cases: [(&[u8], &str); 5] = [
        (b"", "not a GGUF file"),
        (b"GGUF", "the version is missing"),
        (&llama().bytes()[..5000], "(is the download complete?)"),
        (&Writer::new().row("a", &[32], 20, 0).bytes(), "type 20 (IQ4_NL) is not supported"),
        (&long, "its header is larger than 64 MiB"),
    ];
    for (file, message) in cases {
        let fake = FakeHub::start(&[("tiny.gguf", file)]);
        let model = show_remote(&fake, REPO);
        let problem = model["weights_problem"].as_str().unwrap();
        assert!(
            problem.contains(message) && problem.contains("tiny.gguf"),
            "expected {message:?} and the file name, found {problem:?}"
        );
        assert!(fake.state.lock().unwrap().sent_bytes <= MB);
        assert!(text(&remote(&fake, &[]).stdout).contains("why not"));
    }
    let fake = FakeHub::start(&[("tiny.gguf", &llama().bytes())]);
    fake.change(|world| world.files_refused = Some((403, "GatedRepo")));
    assert_fails(&remote(&fake, &[]), 4, &["accept its license"]);
    fake.change(|world| {
        world.files_refused = None;
        world.lost = Some("tiny.gguf");
    });
    assert_fails(&remote(&fake, &[]), 1, &["the hub lists 'tiny.gguf'", "does not have it"]);
    // A mirror may omit file sizes. inferno then requests the size of each file of the GGUF model.
    fake.change(|world| {
        world.lost = None;
        world.lists_sizes = false;
    });
    assert_eq!(show_remote(&fake, REPO)["layers"], 3);
    let home = tempfile::tempdir().unwrap();
    assert!(command(&home, &fake).output().unwrap().status.success());
}

/// The license in the GGUF file takes precedence over the license in README.md.
/// A license in the GGUF file that is blank or not a string is ignored.
#[test]
fn license_is_read_from_the_file_or_the_readme() {
    let license = |writer: Writer| {
        let fake = FakeHub::start(&[("tiny.gguf", &writer.bytes()), ("README.md", b"---\nlicense: mit\n---\n")]);
        show_remote(&fake, REPO)["license"].clone()
    };
    assert_eq!(license(Writer::new()), "mit");
    assert_eq!(license(Writer::new().string("general.license", " ")), "mit");
    assert_eq!(license(Writer::new().string("general.license", "apache-2.0")), "apache-2.0");
    let other = || Writer::new().string("general.license", "other");
    assert_eq!(license(other()), "other");
    assert_eq!(license(other().string("general.license.name", "qwen")), "qwen");
    assert_eq!(license(Writer::new().u32("general.license", 3)), "mit");
}
