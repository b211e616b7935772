//! How a download goes, for whoever looks on: bars on a terminal, now and then a line where there is none, or nothing.

use std::collections::HashMap;
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget};

use super::list::size;
use super::style;
use crate::hub::{Progress, Snapshot};
use crate::repl::style::printable;

/// Between two lines where there is no terminal.
const EVERY: Duration = Duration::from_secs(5);

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
    state: Mutex<State>,
}

struct State {
    files: HashMap<String, File>,
    lines: Lines,
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
        let state = State { files: HashMap::new(), lines: Lines::new(Instant::now()) };
        Self { listener, done, bars, total, state: Mutex::new(state) }
    }

    /// Takes the bars away; what is said from now on stands by itself.
    pub fn finish(&self) {
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
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn write_line(text: &str) {
    // A closed stderr is no reason to end a download.
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn bar(size: u64, name: &str) -> ProgressBar {
    let bar = ProgressBar::new(size);
    bar.set_style(style("{msg:40!} {wide_bar} {bytes:>11}/{total_bytes:11} {bytes_per_sec:>13} {eta:>4}"));
    bar.set_message(printable(name));
    bar
}

impl Progress for Show {
    fn already_there(&self, _: &Snapshot) {
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
                self.bars.add(self.total.clone());
                self.total.set_style(bar(0, "").style());
                self.total.set_message("all files");
                self.total.set_length(all_bytes);
            }
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
        let done_bytes = state.files.values().map(|file| file.done).sum();
        let all_bytes = state.files.values().map(|file| file.size).sum();
        self.total.set_position(done_bytes);
        if first {
            self.total.reset_eta();
        }
        if let Some(line) = state.lines.next(Instant::now(), first, done_bytes, all_bytes, self.done)
            && self.listener == Listener::Lines
        {
            write_line(&line);
        }
    }

    fn verifying(&self, name: &str) {
        if let Some(bar) = self.state().files.get(name).and_then(|file| file.bar.as_ref()) {
            bar.set_message(printable(&format!("verifying {name}")));
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

    fn next(&mut self, now: Instant, first: bool, done: u64, all: u64, verb: &str) -> Option<String> {
        if first {
            self.had_bytes = done;
        }
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
        assert_eq!(lines.next(at(0), true, 100 * mb, all, "fetched"), None);
        assert_eq!(lines.next(at(4), false, 130 * mb, all, "fetched"), None);
        let line = lines.next(at(5), false, 150 * mb, all, "fetched").unwrap();
        assert_eq!(line, "150.0 MB of 400.0 MB fetched, 37 %, 10.0 MB/s, 25 s left");
        assert_eq!(lines.next(at(9), false, 390 * mb, all, "fetched"), None);
        assert!(lines.next(at(10), false, 400 * mb, all, "fetched").unwrap().contains("100 %, 30.0 MB/s, 0 s left"));
        assert_eq!(
            (duration(59), duration(185), duration(7830)),
            ("59 s".into(), "3 min 5 s".into(), "2 h 10 min".into())
        );
    }
}
