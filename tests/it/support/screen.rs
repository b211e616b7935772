//! Runs a command in a pseudo terminal. Tests can check the visible screen, the raw output and the terminal modes.

use std::fs::File;
use std::io::{Read, Write};
use std::num::NonZero;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::kill;
use nix::sys::termios::{LocalFlags, tcgetattr};
use nix::sys::wait::WaitStatus;
use nix::unistd::Pid;
use rexpect::process::{PtyProcess, Signal};
use tempfile::TempDir;

use crate::support::at_home;

/// The time limit for expected output and for the end of the program.
/// It is long, because a debug build on a busy machine is slow.
const TIMEOUT: Duration = Duration::from_secs(120);

pub const DEMO: [&str; 6] = ["play", "demo", "--device", "cpu", "--temperature", "0"];

pub struct Screen {
    process: PtyProcess,
    pid: Pid,
    /// The path of the terminal device.
    tty: String,
    file: File,
    terminal: vt100::Parser,
    /// All output that was read from the pseudo terminal.
    pub written: Vec<u8>,
    /// The index in `written` at which the next call of `wait` starts to search.
    seen: usize,
}

impl Screen {
    /// Starts inferno in a window of 24 rows and 80 columns.
    pub fn new(home: &TempDir, args: &[&str], environment: &[(&str, &str)]) -> Self {
        Self::with_script(home, "exec \"$@\"", args, environment)
    }

    /// Runs a shell script in which `$@` expands to the command line of inferno.
    pub fn with_script(home: &TempDir, script: &str, args: &[&str], environment: &[(&str, &str)]) -> Self {
        let mut command = at_home(Command::new("sh"), home);
        command.envs(environment.iter().copied());
        command
            .args([
                "-c",
                &format!("stty sane rows 24 cols 80; echo here $$ $(tty); {script}"),
                "sh",
                env!("CARGO_BIN_EXE_inferno"),
            ])
            .args(args);
        let process = PtyProcess::new(command).unwrap();
        let file = process.get_file_handle().unwrap();
        let cells = |count| NonZero::new(count).unwrap();
        let terminal = vt100::Parser::new(cells(24), cells(80), 5000);
        let (pid, tty) = (Pid::from_raw(0), String::new());
        let mut screen = Self { process, pid, tty, file, terminal, written: Vec::new(), seen: 0 };
        screen.wait("here ");
        let here = screen.wait("\r\n");
        let (pid, tty) = here.split_once(' ').unwrap();
        (screen.pid, screen.tty) = (Pid::from_raw(pid.parse().unwrap()), tty.to_string());
        screen
    }

    /// Starts a chat with the demo model and waits for the first prompt.
    pub fn chat(home: &TempDir, args: &[&str]) -> Self {
        let mut screen = Self::new(home, &[&DEMO, args].concat(), &[]);
        screen.wait(">>> ");
        screen
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Waits at most `timeout_ms` milliseconds for output, and reads it. Returns false if nothing was read.
    fn pump(&mut self, timeout_ms: u16) -> bool {
        let mut ready = [PollFd::new(self.file.as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, PollTimeout::from(timeout_ms)).unwrap_or(0) == 0 {
            return false;
        }
        let mut bytes = [0; 65536];
        // After the program ends, reading from the pseudo terminal returns an error instead of end-of-file.
        let Ok(length @ 1..) = self.file.read(&mut bytes) else { return false };
        self.terminal.process(&bytes[..length]);
        self.written.extend(&bytes[..length]);
        true
    }

    /// Waits until `text` appears in the output from `seen` on. Returns the output before `text`.
    /// Moves `seen` past `text`. Panics if the program exits first, or after [`TIMEOUT`].
    pub fn wait(&mut self, text: &str) -> String {
        let start = Instant::now();
        loop {
            let new = &self.written[self.seen..];
            if let Some(at) = new.windows(text.len()).position(|window| window == text.as_bytes()) {
                let before = String::from_utf8_lossy(&new[..at]).into_owned();
                self.seen += at + text.len();
                return before;
            }
            // On failure, show only the end of the output.
            let new = String::from_utf8_lossy(&new[new.len().saturating_sub(2000)..]).into_owned();
            assert!(start.elapsed() < TIMEOUT, "timed out waiting for {text:?}; output: {new:?}");
            if !self.pump(200) {
                assert!(
                    self.process.status() == Some(WaitStatus::StillAlive),
                    "the program exited before it wrote {text:?}; output: {new:?}"
                );
            }
        }
    }

    /// Waits until no output has arrived for 400 ms.
    pub fn settle(&mut self) {
        while self.pump(400) {}
    }

    /// Reads output for 200 ms. Unlike `settle`, also ends while an answer streams.
    pub fn settle_briefly(&mut self) {
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(200) {
            self.pump(50);
        }
    }

    /// Types bytes. Meanwhile, reads the output, because the program blocks if its output is not read.
    pub fn send(&mut self, bytes: &[u8]) {
        for piece in bytes.chunks(1024) {
            let mut rest = piece;
            while !rest.is_empty() {
                self.pump(0);
                let mut ready = [PollFd::new(self.file.as_fd(), PollFlags::POLLOUT)];
                if poll(&mut ready, PollTimeout::from(100u8)).unwrap() > 0 {
                    let length = self.file.write(rest).unwrap();
                    rest = &rest[length..];
                }
            }
        }
    }

    /// Types a line. Returns its echo and the output up to the next prompt.
    pub fn say(&mut self, line: &str) -> String {
        self.settle();
        self.seen = self.written.len();
        self.send(line.as_bytes());
        self.send(b"\r");
        // Skip the echo, which ends with a line break, because the editor may print the old prompt again in it.
        let echo = self.wait("\n");
        echo + &self.wait(">>> ")
    }

    pub fn signal(&mut self, signal: Signal) {
        self.process.signal(signal).unwrap();
    }

    /// Waits for the program to end and returns its exit status.
    pub fn end(&mut self) -> WaitStatus {
        let start = Instant::now();
        loop {
            while self.pump(100) {}
            match self.process.status() {
                Some(WaitStatus::StillAlive) => assert!(start.elapsed() < TIMEOUT, "still running: {:?}", self.rows()),
                Some(status) => return status,
                None => panic!("no status"),
            }
        }
    }

    /// Resizes the window, as a user would with the mouse. Returns all rows as they were before.
    ///
    /// Stops the program meanwhile, and reads its output before the size changes.
    /// Otherwise, on a busy machine, the screen could show much output for the old size at the new size.
    pub fn resize(&mut self, rows: u16, columns: u16) -> Vec<String> {
        kill(self.pid, Signal::SIGSTOP).unwrap();
        while self.pump(50) {}
        let before = self.all_rows();
        let slave = File::open(&self.tty).unwrap();
        let size = [rows.to_string(), columns.to_string()];
        let status = Command::new("stty").args(["rows", &size[0], "cols", &size[1]]).stdin(Stdio::from(slave)).status();
        assert!(status.unwrap().success());
        self.terminal.screen_mut().set_size(NonZero::new(rows).unwrap(), NonZero::new(columns).unwrap());
        kill(self.pid, Signal::SIGCONT).unwrap();
        before
    }

    /// Returns whether the terminal has the modes that a shell expects, such as echo and line editing.
    pub fn is_sane(&self) -> bool {
        let flags = tcgetattr(&self.file).unwrap().local_flags;
        flags.contains(LocalFlags::ECHO | LocalFlags::ICANON | LocalFlags::ISIG | LocalFlags::IEXTEN)
    }

    /// Returns the rows on the screen, without the empty rows at the end.
    pub fn rows(&self) -> Vec<String> {
        let text = self.terminal.screen().contents();
        text.trim_end().lines().map(|line| line.trim_end().to_string()).collect()
    }

    /// Returns all rows, including rows that scrolled out of view.
    pub fn all_rows(&mut self) -> Vec<String> {
        self.rows_with_history(|_| true)
    }

    /// Returns all rows, with spaces in place of dim text such as reasoning.
    pub fn bright_rows(&mut self) -> Vec<String> {
        self.rows_with_history(|cell| !cell.dim())
    }

    /// Returns all rows. Cells that `is_shown` rejects become spaces.
    fn rows_with_history(&mut self, is_shown: impl Fn(&vt100::Cell) -> bool) -> Vec<String> {
        let (height, width) = self.terminal.screen().size();
        let (height, width) = (height.get(), width.get());
        let read_row = |screen: &vt100::Screen, row: u16| {
            let cells = (0..width).filter_map(|column| screen.cell(row, column));
            let text = |cell: &vt100::Cell| {
                if is_shown(cell) && cell.has_contents() {
                    cell.contents().to_string()
                } else {
                    " ".repeat(usize::from(!cell.is_wide_continuation()))
                }
            };
            cells.map(text).collect::<String>().trim_end().to_string()
        };
        self.terminal.screen_mut().set_scrollback(usize::MAX);
        let mut back = self.terminal.screen().scrollback();
        let mut all = Vec::new();
        while back > 0 {
            self.terminal.screen_mut().set_scrollback(back);
            let count = back.min(usize::from(height));
            all.extend((0..count as u16).map(|row| read_row(self.terminal.screen(), row)));
            back -= count;
        }
        self.terminal.screen_mut().set_scrollback(0);
        all.extend((0..height).map(|row| read_row(self.terminal.screen(), row)));
        all
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.process.kill(Signal::SIGKILL);
    }
}
