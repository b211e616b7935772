//! Tests of GGUF models that are split into several files.

use std::path::Path;

use inferno::weights::gguf::GgufCheckpoint;
use tempfile::TempDir;

use crate::support::gguf::writer::Writer;
use crate::support::golden;

/// Copies golden files to a temporary folder. Each pair is (name of the golden file, name of the copy).
fn copied(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (from, to) in files {
        std::fs::copy(golden("gguf").join(from), folder.path().join(to)).unwrap();
    }
    folder
}

const SHARDS: [&str; 3] = ["tiny-00001-of-00003.gguf", "tiny-00002-of-00003.gguf", "tiny-00003-of-00003.gguf"];

fn error(path: &Path) -> String {
    format!("{:#}", GgufCheckpoint::open(path).err().expect("an error"))
}

#[test]
fn any_shard_opens_the_whole_model() {
    let whole = GgufCheckpoint::open(&golden("gguf").join("tiny.gguf")).unwrap();
    for shard in SHARDS {
        let checkpoint = GgufCheckpoint::open(&golden("gguf").join(shard)).unwrap();
        assert_eq!(checkpoint.files().count(), 3);
        assert_eq!(checkpoint.metadata().u32("all.u8").unwrap(), Some(200));
        assert_eq!(checkpoint.tensors().count(), whole.tensors().count());
        for (name, info) in whole.tensors() {
            let (view, want) = (checkpoint.view(name).unwrap(), whole.view(name).unwrap());
            assert_eq!((view.info.ggml_type, &view.info.shape), (info.ggml_type, &info.shape), "{name}");
            assert_eq!(view.bytes.read().unwrap(), want.bytes.read().unwrap(), "{name}");
        }
    }
}

#[test]
fn part_names_may_have_capitals() {
    let names = SHARDS.map(|shard| shard.replace(".gguf", ".GGUF"));
    let folder = copied(&[(SHARDS[0], &names[0]), (SHARDS[1], &names[1]), (SHARDS[2], &names[2])]);
    assert_eq!(GgufCheckpoint::open(&folder.path().join(&names[1])).unwrap().files().count(), 3);
}

#[test]
fn missing_and_mixed_shards_are_errors() {
    let all = SHARDS.map(|shard| (shard, shard));
    let folder = copied(&[all[0], all[2]]);
    let message = error(&folder.path().join(SHARDS[2]));
    assert!(
        message.starts_with("cannot open the model: shard 2 of 3 is missing: ") && message.contains(SHARDS[1]),
        "{message}"
    );

    let folder = copied(&[(SHARDS[0], "model.gguf")]);
    let message = error(&folder.path().join("model.gguf"));
    assert!(message.contains("it is one of 3 shards, but its name has no shard number"), "{message}");

    let folder = copied(&[(SHARDS[0], SHARDS[1]), all[2]]);
    let message = error(&folder.path().join(SHARDS[1]));
    assert!(message.ends_with("its metadata says shard 1 of 3; was the file renamed?"), "{message}");

    let folder = copied(&[all[0], (SHARDS[0], SHARDS[1]), all[2]]);
    let message = error(&folder.path().join(SHARDS[0]));
    assert!(message.contains("has the wrong name: it is shard 1 of 3"), "{message}");

    let folder = copied(&[all[0], ("tiny.gguf", SHARDS[1]), all[2]]);
    let message = error(&folder.path().join(SHARDS[0]));
    assert!(
        message.contains(
            "belongs to another model: it is shard 1 of 1 (tensors: unknown), expected shard 2 of 3 (tensors: 15)"
        ),
        "{message}"
    );
}

#[test]
fn inconsistent_split_metadata_is_an_error() {
    let shard = |number: u32, count: u32, tensors: u32| {
        Writer::new().u32("split.no", number).u32("split.count", count).u32("split.tensors.count", tensors)
    };
    let one = |writer: Writer| writer.tensor("a.weight", &[1], 0, &[0; 4]);
    let cases = [
        (one(shard(0, 2, 2)), one(shard(1, 2, 2)), "tensor a.weight is in two shards; the second is "),
        (
            one(shard(0, 2, 2)),
            shard(1, 2, 2),
            "hold 1 tensor, but their metadata says 2; are they shards of the same model?",
        ),
        (one(shard(0, 2, 1)), shard(1, 2, 9), "it is shard 2 of 2 (tensors: 9), expected shard 2 of 2 (tensors: 1)"),
        (one(shard(2, 2, 1)), shard(1, 2, 1), "metadata key split.no: 2 is not less than split.count 2"),
        (shard(0, 1 << 20, 1), shard(1, 2, 1), "1048576 shards exceed the limit of 1024"),
        (Writer::new().u32("split.count", 2), shard(1, 2, 1), "metadata key split.no is missing"),
        (Writer::new().string("split.count", "2"), shard(1, 2, 1), "metadata key split.count: expected an integer"),
    ];
    for (first, second, want) in cases {
        let folder = tempfile::tempdir().unwrap();
        let path = |number: u32| folder.path().join(format!("m-{number:05}-of-00002.gguf"));
        std::fs::write(path(1), first.bytes()).unwrap();
        std::fs::write(path(2), second.bytes()).unwrap();
        let message = error(&path(1));
        assert!(message.contains(want), "expected {want:?}, found {message:?}");
    }
}
