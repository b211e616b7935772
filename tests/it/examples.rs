//! Runs the library examples, and checks that the Rust code in README.md is part of `examples/blocking.rs`.
//! `library_page` checks the code in docs/library.md.

mod library_page;

mod blocking {
    include!("../../examples/blocking.rs");

    #[test]
    fn example_runs() {
        main().unwrap();
    }
}

mod async_stream {
    include!("../../examples/async_stream.rs");

    #[test]
    fn example_runs() {
        main().unwrap();
    }
}

#[test]
fn readme_shows_code_of_the_example() {
    let example = include_str!("../../examples/blocking.rs");
    let readme = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")).unwrap();
    let blocks: Vec<&str> = readme.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(blocks.len(), 1);
    // Skip imports, because an import in README.md may list fewer names than the same import in the example.
    for line in blocks[0].lines().filter(|line| !line.starts_with("use ")) {
        assert!(example.lines().any(|other| other == line), "this README line is not in the example: {line}");
    }
}
