//! Streams Markdown from standard input to the terminal, formatted as in the chat.
//! Tests the chat's formatting without a model. It uses the internal module `terminal`, so do not copy it.
//!
//! Run: `cargo run --release --example markdown < README.md`.
//! The optional argument is how many times per second four more characters arrive [200].

use std::io::{Read, stdin, stdout};
use std::time::Duration;

use inferno::chat::{Channel, Delta};
use inferno::terminal::{TurnView, WindowSize};

fn main() -> anyhow::Result<()> {
    let per_second: u32 = std::env::args().nth(1).map_or(Ok(200), |number| number.parse())?;
    let mut text = String::new();
    stdin().read_to_string(&mut text)?;
    let (mut view, mut out) = (TurnView::new(WindowSize::now()), stdout().lock());
    let characters: Vec<char> = text.chars().collect();
    for piece in characters.chunks(4) {
        let delta = Delta { channel: Channel::Answer, text: piece.iter().collect() };
        view.show(&delta, WindowSize::now(), &mut out)?;
        std::thread::sleep(Duration::from_secs(1) / per_second.max(1));
    }
    Ok(view.finish(WindowSize::now(), &mut out)?)
}
