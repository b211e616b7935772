//! Saves and restores the terminal modes.

use std::io::{IsTerminal, stderr, stdin, stdout};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
use nix::unistd::{Pid, getpgrp, tcgetpgrp};

/// The modes before the chat started.
static ORIGINAL: Mutex<Option<Termios>> = Mutex::new(None);

/// Saves the terminal modes and restores them when a signal ends the program.
///
/// Call this before any other thread starts, because threads inherit the mask of blocked signals.
/// A dedicated thread waits for SIGTERM, SIGHUP and SIGQUIT, restores the modes and raises the signal again.
pub fn guard() {
    let Ok(original) = tcgetattr(stdin().as_fd()) else { return };
    *ORIGINAL.lock().unwrap_or_else(PoisonError::into_inner) = Some(original);
    let fatal: SigSet = [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT].into_iter().collect();
    let mut blocked = fatal;
    // With SIGXFSZ blocked, a write beyond `ulimit -f` fails with an error instead of ending the chat.
    blocked.add(Signal::SIGXFSZ);
    if blocked.thread_block().is_err() {
        return;
    }
    let waiting = std::thread::Builder::new().spawn(move || {
        while let Ok(signal) = fatal.wait() {
            restore();
            let received: SigSet = [signal].into_iter().collect();
            let _ = received.thread_unblock();
            let _ = raise(signal);
            // The program is still running, so it must be ignoring this signal, as it does under `nohup`.
            let _ = received.thread_block();
        }
    });
    if waiting.is_err() {
        let _ = blocked.thread_unblock();
    }
}

/// Returns whether this program is in the foreground. The system stops a background program that changes the modes.
pub fn is_foreground() -> bool {
    tcgetpgrp(stdin()).is_ok_and(|group| group == getpgrp())
}

/// Suspends the process group, as Ctrl-Z does, until the shell resumes it. The caller must restore the modes first.
pub fn stop_process() {
    let _ = kill(Pid::from_raw(0), Signal::SIGTSTP);
    // Another thread may receive the signal first, so wait until this thread is stopped too.
    // If a signal to end the program arrived while it was stopped, it ends here, before the modes change again.
    std::thread::sleep(Duration::from_millis(100));
}

/// Restores the modes that [`guard`] saved.
pub fn restore() {
    if !is_foreground() {
        return;
    }
    if let Some(original) = ORIGINAL.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
        let _ = tcsetattr(stdin().as_fd(), SetArg::TCSANOW, original);
        write("\x1b[0m\x1b[?2004l");
    }
}

/// Turns bracketed paste on or off. While it is on, the terminal marks the start and the end of pasted text.
pub fn set_bracketed_paste(on: bool) {
    write(if on { "\x1b[?2004h" } else { "\x1b[?2004l" });
}

/// Writes to the terminal without locking stdout or stderr, because another thread may hold the lock.
///
/// Gives up if output is paused (Ctrl-S).
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
