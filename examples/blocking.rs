// Prints the answer of the demo model as a blocking iterator delivers it.
//
//     cargo run --release --example blocking

use inferno::chat::Message;
use inferno::device::DeviceChoice;
use inferno::{Engine, Request, hub};

fn main() -> anyhow::Result<()> {
    inferno::init();
    let snapshot = hub::Hub::from_env()?.find("demo", None)?;
    let engine = Engine::builder(&snapshot.path).device(DeviceChoice::Cpu).load()?;
    for event in engine.submit(Request::chat([Message::user("How do I list my models?")]))? {
        print!("{}", event?.answer());
    }
    Ok(())
}
