//! Shows the progress of a download or a verification: bars on a terminal, lines elsewhere.

use std::collections::HashMap;
use std::io::{IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget};

use super::progress_style;
use crate::hub::{Progress, Snapshot};
use crate::text::{counted, printable, size};

/// The minimum time between two progress lines.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// With [`ProgressStyle::Lines`], a line announces the verification of a downloaded file of at least this many bytes.
const LARGE_BYTES: u64 = 1_000_000_000;

/// How progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgressStyle {
    /// Progress bars, for a terminal.
    Bars,
    /// Progress lines at least `LINE_INTERVAL` apart, for a log, a pipe or a dumb terminal.
    Lines,
    Silent,
}

impl ProgressStyle {
    /// Returns `Silent` if `--quiet` is set, otherwise the style from [`detect`](Self::detect).
    pub fn new(quiet: bool) -> Self {
        if quiet { Self::Silent } else { Self::detect() }
    }

    /// Chooses a style for stderr: `Silent` if HF_HUB_DISABLE_PROGRESS_BARS is on, otherwise `Bars` or `Lines`.
    pub fn detect() -> Self {
        let disabled = std::env::var("HF_HUB_DISABLE_PROGRESS_BARS").unwrap_or_default().to_uppercase();
        if ["1", "ON", "YES", "TRUE"].contains(&disabled.as_str()) {
            return Self::Silent;
        }
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        if std::io::stderr().is_terminal() && !is_dumb { Self::Bars } else { Self::Lines }
    }
}

/// The operation whose progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Download,
    Verification,
}

impl Operation {
    /// Returns the word after the byte counts in a progress line, as in `1 GB of 2 GB fetched`.
    fn participle(self) -> &'static str {
        match self {
            Self::Download => "fetched",
            Self::Verification => "read",
        }
    }
}

/// The progress bars or progress lines of one download or verification.
pub struct ProgressView {
    style: ProgressStyle,
    operation: Operation,
    bars: MultiProgress,
    total: ProgressBar,
    state: Arc<Mutex<ProgressState>>,
    /// Dropping this sender ends the thread that calls [`ProgressState::tick`] every second.
    _ticker: Option<Sender<()>>,
}

struct ProgressState {
    files: HashMap<String, FileProgress>,
    /// The sum of `done` over all files. Stored because recomputing the sum on each update is slow.
    done_bytes: u64,
    total_bytes: u64,
    lines: LineTimer,
    has_ended: bool,
}

impl ProgressState {
    /// Writes a progress line if one is due, even if no bytes have arrived since the last line.
    fn tick(&mut self, operation: Operation) {
        let (done, total) = (self.done_bytes, self.total_bytes);
        if !self.files.is_empty()
            && !self.has_ended
            && let Some(line) = self.lines.next_line(Instant::now(), done, total, operation)
        {
            write_line(&line);
        }
    }
}

#[derive(Default)]
struct FileProgress {
    size: u64,
    done: u64,
    is_started: bool,
    bar: Option<ProgressBar>,
}

impl ProgressView {
    pub fn new(style: ProgressStyle, operation: Operation) -> Self {
        let target = match style {
            ProgressStyle::Bars => ProgressDrawTarget::stderr(),
            _ => ProgressDrawTarget::hidden(),
        };
        let bars = MultiProgress::with_draw_target(target);
        let total = ProgressBar::new(0);
        let state = ProgressState {
            files: HashMap::new(),
            done_bytes: 0,
            total_bytes: 0,
            lines: LineTimer::new(Instant::now()),
            has_ended: false,
        };
        let state = Arc::new(Mutex::new(state));
        let _ticker = (style == ProgressStyle::Lines).then(|| {
            let (sender, receiver) = mpsc::channel();
            let state = state.clone();
            std::thread::spawn(move || {
                while receiver.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                    state.lock().unwrap_or_else(PoisonError::into_inner).tick(operation);
                }
            });
            sender
        });
        Self { style, operation, bars, total, state, _ticker }
    }

    /// Removes the progress bars and stops writing progress lines.
    pub fn finish(&self) {
        self.state().has_ended = true;
        self.total.finish_and_clear();
        let _ = self.bars.clear();
    }

    /// Writes a message above the progress bars, or as a line if there are no bars. `Silent` writes nothing.
    fn message(&self, text: &str) {
        let text = printable(text);
        match self.style {
            ProgressStyle::Bars => self.bars.suspend(|| write_line(&text)),
            ProgressStyle::Lines => write_line(&text),
            ProgressStyle::Silent => {}
        }
    }

    fn state(&self) -> MutexGuard<'_, ProgressState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn write_line(text: &str) {
    // A closed stderr must not stop a download or a verification.
    let _ = writeln!(std::io::stderr(), "{text}");
}

fn bar(size: u64, name: &str) -> ProgressBar {
    let bar = ProgressBar::new(size);
    bar.set_style(progress_style(match console::Term::stderr().size().1 {
        0..70 => "{wide_msg} {percent:>3} % {eta:>4}",
        70..100 => {
            "{msg:24!} {wide_bar} {decimal_bytes:>9}/{decimal_total_bytes:9} {decimal_bytes_per_sec:>11} {eta:>4}"
        }
        _ => "{msg:40!} {wide_bar} {decimal_bytes:>9}/{decimal_total_bytes:9} {decimal_bytes_per_sec:>11} {eta:>4}",
    }));
    bar.set_message(printable(name));
    bar
}

impl Progress for ProgressView {
    fn already_present(&self, _: &Snapshot) {
        self.message("nothing to fetch: all files are already downloaded");
    }

    fn asking_for_sizes(&self, files: usize) {
        self.message(&format!("asking the hub for the sizes of {}", counted(files, "file")));
    }

    fn start(&self, files: &[(String, u64)]) {
        let total_bytes = files.iter().fold(0u64, |sum, (_, size)| sum.saturating_add(*size));
        let entry =
            |(name, size): &(String, u64)| (name.clone(), FileProgress { size: *size, ..FileProgress::default() });
        let mut state = self.state();
        state.files = files.iter().map(entry).collect();
        (state.done_bytes, state.total_bytes) = (0, total_bytes);
        state.lines = LineTimer::new(Instant::now());
        drop(state);
        match self.style {
            ProgressStyle::Bars => {
                self.total.set_style(bar(0, "").style());
                self.total.set_message("all files");
                self.total.set_length(total_bytes);
                self.bars.add(self.total.clone());
            }
            _ if files.is_empty() => {}
            _ => self.message(&format!("{}, {}", counted(files.len(), "file"), size(total_bytes))),
        }
    }

    fn file(&self, name: &str, done_bytes: u64) {
        let mut guard = self.state();
        let state = &mut *guard;
        let Some(file) = state.files.get_mut(name) else { return };
        let is_first = !std::mem::replace(&mut file.is_started, true);
        let before = std::mem::replace(&mut file.done, done_bytes.min(file.size));
        state.done_bytes = state.done_bytes.saturating_sub(before).saturating_add(file.done);
        if self.style == ProgressStyle::Bars {
            if done_bytes >= file.size {
                if let Some(bar) = file.bar.take() {
                    bar.finish_and_clear();
                }
            } else if !is_first {
                let bar = file.bar.get_or_insert_with(|| self.bars.insert_before(&self.total, bar(file.size, name)));
                let is_new = bar.position() == 0;
                bar.set_position(done_bytes);
                // Bytes downloaded in an earlier run do not count toward the rate.
                if is_new {
                    bar.reset_eta();
                }
            }
        }
        let file_bytes = file.done;
        self.total.set_position(state.done_bytes);
        // In a download, the first report of a file includes the bytes from an earlier run, which do not count
        // toward the rate. A verification never continues an earlier run, so all of its bytes count.
        if is_first && self.operation == Operation::Download {
            self.total.reset_eta();
            state.lines.initial_bytes = state.lines.initial_bytes.saturating_add(file_bytes);
        }
        if self.style == ProgressStyle::Lines {
            state.tick(self.operation);
        }
    }

    fn verifying(&self, name: &str) {
        let state = self.state();
        let Some(file) = state.files.get(name) else { return };
        if let Some(bar) = &file.bar {
            bar.set_message(printable(&format!("verifying {name}")));
        } else if file.size >= LARGE_BYTES && self.style == ProgressStyle::Lines {
            write_line(&printable(&format!("verifying {name}")));
        }
    }

    fn retrying(&self, name: &str, cause: &str, wait: Duration) {
        let when = match wait.as_secs_f32().round() as u64 {
            0 => "retrying now".to_string(),
            seconds => format!("retrying in {seconds} s"),
        };
        self.message(&format!("{name}: {cause}; {when}"));
    }

    fn waiting(&self, repo: &str) {
        self.message(&format!("another inferno process is using {repo}; waiting for it to finish"));
    }
}

/// Decides when the next progress line is due, and formats it.
struct LineTimer {
    start: Instant,
    /// Bytes that an earlier run downloaded, which do not count toward the rate.
    initial_bytes: u64,
    last: Instant,
}

impl LineTimer {
    fn new(now: Instant) -> Self {
        Self { start: now, initial_bytes: 0, last: now }
    }

    fn next_line(&mut self, now: Instant, done: u64, total: u64, operation: Operation) -> Option<String> {
        if now.duration_since(self.last) < LINE_INTERVAL {
            return None;
        }
        self.last = now;
        let per_s = done.saturating_sub(self.initial_bytes) as f64 / now.duration_since(self.start).as_secs_f64();
        let percent = if total == 0 { 100 } else { (done as f64 / total as f64 * 100.0) as u64 };
        let left = if per_s > 0.0 {
            format!(", {} left", duration((total.saturating_sub(done) as f64 / per_s).ceil() as u64))
        } else {
            String::new()
        };
        let participle = operation.participle();
        Some(format!("{} of {} {participle}, {percent} %, {}/s{left}", size(done), size(total), size(per_s as u64)))
    }
}

/// Formats seconds as `45 s`, `3 min 5 s` or `2 h 10 min`.
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
    fn a_line_is_due_every_few_seconds() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut lines = LineTimer::new(start);
        let (mb, total) = (1_000_000, 400_000_000);
        lines.initial_bytes = 100 * mb;
        assert_eq!(lines.next_line(at(4), 130 * mb, total, Operation::Download), None);
        let line = lines.next_line(at(5), 150 * mb, total, Operation::Download).unwrap();
        assert_eq!(line, "150.0 MB of 400.0 MB fetched, 37 %, 10.0 MB/s, 25 s left");
        assert_eq!(lines.next_line(at(9), 390 * mb, total, Operation::Download), None);
        assert!(
            lines
                .next_line(at(10), 400 * mb, total, Operation::Download)
                .unwrap()
                .contains("100 %, 30.0 MB/s, 0 s left")
        );
        assert_eq!(
            (duration(59), duration(185), duration(7830)),
            ("59 s".into(), "3 min 5 s".into(), "2 h 10 min".into())
        );
    }

    #[test]
    fn only_bytes_from_an_earlier_run_are_left_out_of_the_rate() {
        for (operation, initial_bytes) in [(Operation::Download, 50), (Operation::Verification, 0)] {
            let view = ProgressView::new(ProgressStyle::Silent, operation);
            view.start(&[("a".into(), 100), ("b".into(), 100)]);
            // The file `b` is reported for the first time after bytes of `a` have arrived.
            for (name, done_bytes) in [("a", 40), ("a", 100), ("b", 10), ("b", 30)] {
                view.file(name, done_bytes);
            }
            let state = view.state();
            assert_eq!((state.done_bytes, state.lines.initial_bytes), (130, initial_bytes), "{operation:?}");
        }
    }
}
