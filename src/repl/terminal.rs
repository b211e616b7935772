//! The terminal is left as it was found, whatever ends the chat.

use std::io::{IsTerminal, stderr, stdin, stdout};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{Pid, getpgrp, tcgetpgrp};

/// The terminal as it was when the chat began.
static FOUND: Mutex<Option<Termios>> = Mutex::new(None);

/// To be called before there are other threads: they take over which signals are blocked. What is started later does not.
///
/// Signals that end a program get a thread of their own, which puts the terminal back and then lets them do what they do.
pub fn guard() {
    let Ok(found) = tcgetattr(stdin().as_fd()) else { return };
    *FOUND.lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
    let ending: SigSet = [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT].into_iter().collect();
    let mut blocked = ending;
    // A file that grows beyond `ulimit -f` is then an error like a full disk, which the chat survives.
    blocked.add(Signal::SIGXFSZ);
    if blocked.thread_block().is_err() {
        return;
    }
    let waiting = std::thread::Builder::new().spawn(move || {
        while let Ok(signal) = ending.wait() {
            restore();
            let only: SigSet = [signal].into_iter().collect();
            let _ = only.thread_unblock();
            let _ = raise(signal);
            // Still here: this one is ignored, as under `nohup`.
            let _ = only.thread_block();
        }
    });
    if waiting.is_err() {
        let _ = blocked.thread_unblock();
    }
}

/// Whether the terminal is this program's. In the background it is the shell's, and touching it would stop the program.
pub fn is_ours() -> bool {
    tcgetpgrp(stdin()).is_ok_and(|group| group == getpgrp())
}

/// Stops the program and whatever runs with it, until the shell lets it go on. The terminal is as it was found.
pub fn stop() {
    let _ = kill(Pid::from_raw(0), Signal::SIGTSTP);
    // Another thread may get the signal: by then, this one has stopped too. And whoever is told to end while stopped has
    // ended before the terminal is touched again.
    std::thread::sleep(Duration::from_millis(100));
}

/// Puts the terminal back as it was found.
pub fn restore() {
    if !is_ours() {
        return;
    }
    if let Some(found) = FOUND.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
        let _ = tcsetattr(stdin().as_fd(), SetArg::TCSANOW, found);
        write("\x1b[0m\x1b[?2004l");
    }
}

/// Asks the terminal to mark what is pasted, or not to.
pub fn mark_pastes(on: bool) {
    write(if on { "\x1b[?2004h" } else { "\x1b[?2004l" });
}

/// Past all locks and buffers, as another thread may hold them; and not where the terminal takes nothing now (Ctrl-S).
fn write(text: &str) {
    if std::env::var_os("TERM").is_none_or(|term| term == "dumb") {
        return;
    }
    if stdout().is_terminal() {
        write_to(stdout().as_fd(), text);
    } else if stderr().is_terminal() {
        write_to(stderr().as_fd(), text);
    }
}

fn write_to(out: BorrowedFd, text: &str) {
    let mut ready = [PollFd::new(out, PollFlags::POLLOUT)];
    if poll(&mut ready, PollTimeout::from(100u8)).is_ok_and(|ready| ready > 0) {
        let _ = nix::unistd::write(out, text.as_bytes());
    }
}
