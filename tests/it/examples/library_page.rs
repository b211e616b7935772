//! The Rust code in docs/library.md, so that the compiler checks it. A test checks that the page shows this code.

#![expect(dead_code, reason = "the functions are compiled, but not called")]

use inferno::chat::{Channel, Message};
use inferno::device::{DeviceChoice, Devices};
use inferno::engine::EngineBuilder;
use inferno::hub::{FileFilter, Hub};
use inferno::{Engine, EngineHandle, GenerateOptions, Request, RequestStream};

mod program {
    fn main() {
        inferno::init();
        // the rest of the program
    }
}

fn load() -> anyhow::Result<Engine> {
    let hub = inferno::hub::Hub::from_env()?;
    let snapshot = hub.find("openai/gpt-oss-20b", None)?;
    let engine = inferno::Engine::builder(&snapshot.path).context(16_384).load()?;
    Ok(engine)
}

fn download(hub: &Hub) -> anyhow::Result<()> {
    hub.download("openai/gpt-oss-20b", None, &FileFilter::default(), &())?;
    Ok(())
}

fn with_devices<'o>(builder: EngineBuilder<'o>, text: &str) -> anyhow::Result<EngineBuilder<'o>> {
    Ok(builder
        .device(DeviceChoice::Cpu)
        .device(DeviceChoice::Cuda(1))
        .devices(Devices::gpus(2))
        .devices(text.parse().map_err(anyhow::Error::msg)?))
}

fn ask(engine: &EngineHandle) -> anyhow::Result<()> {
    let mut options = GenerateOptions::new(engine.defaults().clone());
    options.max_tokens = Some(200);
    options.sampling.temperature = 0.7;
    let request = Request::chat([Message::user("Name three moons of Jupiter.")]).options(options);

    match engine.submit(request) {
        Ok(stream) => print_answer(stream)?,
        Err(error) => match error.downcast_ref::<inferno::Error>() {
            Some(inferno::Error::ContextFull { prompt_tokens, context_tokens, .. }) => {
                eprintln!("{prompt_tokens} tokens do not fit in {context_tokens}")
            }
            _ => return Err(error),
        },
    }
    Ok(())
}

fn print_answer(mut stream: RequestStream) -> anyhow::Result<()> {
    for event in &mut stream {
        let event = event?;
        print!("{}{}", event.text(Channel::Reasoning), event.answer());
    }
    stream.stop();
    stream.cancel();
    Ok(())
}

fn without_indentation(code: &str) -> String {
    code.lines().map(str::trim).collect::<Vec<_>>().join("\n")
}

/// Each block of Rust code, and each call in a table, must be in this file.
#[test]
fn the_library_page_shows_code_that_compiles() {
    let this_file = without_indentation(include_str!("library_page.rs"));
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/library.md")).unwrap();
    let blocks: Vec<&str> = page.split("```rust\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    let cells = page.lines().filter(|line| line.starts_with('|')).flat_map(|line| line.split('`').skip(1).step_by(2));
    let calls: Vec<&str> = cells.filter(|code| code.ends_with(')')).collect();
    assert_eq!((blocks.len(), calls.len()), (4, 6), "the page has another number of blocks or calls: {calls:?}");
    for code in blocks.into_iter().chain(calls) {
        assert!(this_file.contains(without_indentation(code).trim()), "no function in this file has the code {code}");
    }
}
