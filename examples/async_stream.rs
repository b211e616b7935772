// Prints the answer of the demo model as an async stream delivers it, on the executor of the crate futures.
//
//     cargo run --release --example async_stream

use futures::StreamExt;
use inferno::chat::Message;
use inferno::device::DeviceChoice;
use inferno::{Engine, Request, hub};

async fn answer(engine: &Engine) -> anyhow::Result<()> {
    let mut stream = engine.submit(Request::chat([Message::user("How do I list my models?")]))?;
    while let Some(event) = stream.next().await {
        print!("{}", event?.answer());
    }
    println!("\n{:.1} tokens/s", stream.summary().tok_per_s);
    Ok(())
}

fn main() -> anyhow::Result<()> {
    inferno::init();
    let snapshot = hub::Hub::from_env()?.find("demo", None)?;
    let engine = Engine::builder(&snapshot.path).device(DeviceChoice::Cpu).load()?;
    futures::executor::block_on(answer(&engine))
}
