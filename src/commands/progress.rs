//! How a download goes, for whoever looks on: bars on a terminal, now and then a line where there is none, or nothing.

use std::collections::HashMap;
use std::io::{IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget};

use super::style;
use crate::hub::{Progress, Snapshot};
use crate::text::printable;
use crate::text::size;

/// Between two lines where there is no terminal.
const EVERY: Duration = Duration::from_secs(5);

/// A file that takes so long to verify that a log should say so.
const LARGE_BYTES: u64 = 1_000_000_000;

/// Who hears how it goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listener {
    Terminal,
    /// A log, a pipe.
    Lines,
    Nobody,
}

impl Listener {
    /// Nobody where `--quiet` or HF_HUB_DISABLE_PROGRESS_BARS says so.
    pub fn new(quiet: bool) -> Self {
        let disabled = std::env::var("HF_HUB_DISABLE_PROGRESS_BARS").unwrap_or_default().to_uppercase();
        if quiet || ["1", "ON", "YES", "TRUE"].contains(&disabled.as_str()) {
            return Self::Nobody;
        }
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        if std::io::stderr().is_terminal() && !dumb { Self::Terminal } else { Self::Lines }
    }
}

/// Shows the progress of a download, or of reading what is here.
pub struct Show {
    listener: Listener,
    /// What is done with the bytes: `fetched`, `read`.
    done: &'static str,
    bars: MultiProgress,
    total: ProgressBar,
    state: Arc<Mutex<State>>,
    /// Of the thread that writes lines; it ends when this goes.
    _ticker: Option<Sender<()>>,
}

struct State {
    files: HashMap<String, File>,
    lines: Lines,
    ended: bool,
}

impl State {
    fn done_bytes(&self) -> u64 {
        self.files.values().map(|file| file.done).sum()
    }

    /// Writes a line if one is due, also while nothing comes.
    fn tick(&mut self, verb: &str) {
        let (done, all) = (self.done_bytes(), self.files.values().map(|file| file.size).sum());
        if !self.files.is_empty()
            && !self.ended
            && let Some(line) = self.lines.next(Instant::now(), done, all, verb)
        {
            write_line(&line);
        }
    }
}

#[derive(Default)]
struct File {
    size: u64,
    done: u64,
    told: bool,
    bar: Option<ProgressBar>,
}

impl Show {
    pub fn new(listener: Listener, done: &'static str) -> Self {
        let target = match listener {
            Listener::Terminal => ProgressDrawTarget::stderr(),
            _ => ProgressDrawTarget::hidden(),
        };
        let bars = MultiProgress::with_draw_target(target);
        let total = ProgressBar::new(0);
        let state = State { files: HashMap::new(), lines: Lines::new(Instant::now()), ended: false };
        let state = Arc::new(Mutex::new(state));
        let _ticker = (listener == Listener::Lines).then(|| {
            let (sender, receiver) = mpsc::channel();
            let state = state.clone();
            std::thread::spawn(move || {
                while receiver.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                    state.lock().unwrap_or_else(PoisonError::into_inner).tick(done);
                }
            });
            sender
        });
        Self { listener, done, bars, total, state, _ticker }
    }

    /// Takes the bars away; what is said from now on stands by itself.
    pub fn finish(&self) {
        self.state().ended = true;
        self.total.finish_and_clear();
        let _ = self.bars.clear();
    }

    /// A remark above the bars.
    fn say(&self, text: &str) {
        let text = printable(text);
        match self.listener {
            Listener::Terminal => self.bars.suspend(|| write_line(&text)),
            Listener::Lines => write_line(&text),
            Listener::Nobody => {}
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn write_line(text: &str) {
    // A closed stderr is no reason to end a download.
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn bar(size: u64, name: &str) -> ProgressBar {
    let bar = ProgressBar::new(size);
    bar.set_style(style(match console::Term::stderr().size().1 {
        0..70 => "{wide_msg} {percent:>3} % {eta:>4}",
        70..100 => {
            "{msg:24!} {wide_bar} {decimal_bytes:>9}/{decimal_total_bytes:9} {decimal_bytes_per_sec:>11} {eta:>4}"
        }
        _ => "{msg:40!} {wide_bar} {decimal_bytes:>9}/{decimal_total_bytes:9} {decimal_bytes_per_sec:>11} {eta:>4}",
    }));
    bar.set_message(printable(name));
    bar
}

impl Progress for Show {
    fn already_present(&self, _: &Snapshot) {
        self.say("nothing to fetch, it is all here");
    }

    fn start(&self, files: &[(String, u64)]) {
        let all_bytes = files.iter().map(|(_, size)| size).sum();
        let entry = |(name, size): &(String, u64)| (name.clone(), File { size: *size, ..File::default() });
        let mut state = self.state();
        state.files = files.iter().map(entry).collect();
        state.lines = Lines::new(Instant::now());
        drop(state);
        match self.listener {
            Listener::Terminal => {
                self.total.set_style(bar(0, "").style());
                self.total.set_message("all files");
                self.total.set_length(all_bytes);
                self.bars.add(self.total.clone());
            }
            _ if files.is_empty() => {}
            _ => self.say(&format!("{} files, {}", files.len(), size(all_bytes))),
        }
    }

    fn file(&self, name: &str, done_bytes: u64) {
        let mut state = self.state();
        let Some(file) = state.files.get_mut(name) else { return };
        let first = !std::mem::replace(&mut file.told, true);
        file.done = done_bytes.min(file.size);
        if self.listener == Listener::Terminal {
            if done_bytes >= file.size {
                if let Some(bar) = file.bar.take() {
                    bar.finish_and_clear();
                }
            } else if !first {
                let bar = file.bar.get_or_insert_with(|| self.bars.insert_before(&self.total, bar(file.size, name)));
                // What was there before says nothing about the rate.
                if bar.position() == 0 {
                    bar.reset_eta();
                }
                bar.set_position(done_bytes);
            }
        }
        let done_bytes = state.done_bytes();
        self.total.set_position(done_bytes);
        if first {
            self.total.reset_eta();
            // What was there before says nothing about the rate here, either.
            state.lines.had_bytes = done_bytes;
        }
        if self.listener == Listener::Lines {
            state.tick(self.done);
        }
    }

    fn verifying(&self, name: &str) {
        let state = self.state();
        let Some(file) = state.files.get(name) else { return };
        if let Some(bar) = &file.bar {
            bar.set_message(printable(&format!("verifying {name}")));
        } else if file.size >= LARGE_BYTES && self.listener == Listener::Lines {
            write_line(&printable(&format!("verifying {name}")));
        }
    }

    fn retrying(&self, name: &str, cause: &str, wait: Duration) {
        let when = match wait.as_secs_f32().round() as u64 {
            0 => "again now".to_string(),
            seconds => format!("again in {seconds} s"),
        };
        self.say(&format!("{name}: {cause}; {when}"));
    }

    fn waiting(&self, repo: &str) {
        self.say(&format!("another inferno is at work on {repo}; waiting until it is done"));
    }
}

/// When a line is due, and what it says.
struct Lines {
    start: Instant,
    /// What was there before.
    had_bytes: u64,
    last: Instant,
}

impl Lines {
    fn new(now: Instant) -> Self {
        Self { start: now, had_bytes: 0, last: now }
    }

    fn next(&mut self, now: Instant, done: u64, all: u64, verb: &str) -> Option<String> {
        if now.duration_since(self.last) < EVERY {
            return None;
        }
        self.last = now;
        let per_s = done.saturating_sub(self.had_bytes) as f64 / now.duration_since(self.start).as_secs_f64();
        let percent = if all == 0 { 100 } else { (done as f64 / all as f64 * 100.0) as u64 };
        let left = match per_s > 0.0 {
            true => format!(", {} left", duration((all.saturating_sub(done) as f64 / per_s).ceil() as u64)),
            false => String::new(),
        };
        Some(format!("{} of {} {verb}, {percent} %, {}/s{left}", size(done), size(all), size(per_s as u64)))
    }
}

/// 45 s, 3 min 5 s, 2 h 10 min
fn duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_every_few_seconds() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut lines = Lines::new(start);
        let (mb, all) = (1_000_000, 400_000_000);
        // 100 MB were there before, and do not count for the rate.
        lines.had_bytes = 100 * mb;
        assert_eq!(lines.next(at(4), 130 * mb, all, "fetched"), None);
        let line = lines.next(at(5), 150 * mb, all, "fetched").unwrap();
        assert_eq!(line, "150.0 MB of 400.0 MB fetched, 37 %, 10.0 MB/s, 25 s left");
        assert_eq!(lines.next(at(9), 390 * mb, all, "fetched"), None);
        assert!(lines.next(at(10), 400 * mb, all, "fetched").unwrap().contains("100 %, 30.0 MB/s, 0 s left"));
        assert_eq!(
            (duration(59), duration(185), duration(7830)),
            ("59 s".into(), "3 min 5 s".into(), "2 h 10 min".into())
        );
    }
}
