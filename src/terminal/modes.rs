//! Saves the terminal modes and restores them when the program ends.
//! Also controls bracketed paste and suspends the program.

use std::io::{IsTerminal, stderr, stdin, stdout};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::time::Duration;

use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::termios::tcgetattr;
use nix::unistd::{Pid, getpgrp, tcgetpgrp};

/// The terminal modes before inferno changed them, and where to write control sequences.
static ORIGINAL: OnceLock<Original> = OnceLock::new();

struct Original {
    modes: libc::termios,
    /// The file descriptor for control sequences. `None` if neither stdout nor stderr is a terminal that supports them.
    output: Option<libc::c_int>,
}

/// Saves the modes of the terminal on stdin, and registers a function that restores them when the program exits.
/// Returns false if stdin is not a terminal.
pub(super) fn save() -> bool {
    let Ok(modes) = tcgetattr(stdin().as_fd()) else { return false };
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    let output = if is_dumb {
        None
    } else if stdout().is_terminal() {
        Some(libc::STDOUT_FILENO)
    } else {
        stderr().is_terminal().then_some(libc::STDERR_FILENO)
    };
    if ORIGINAL.set(Original { modes: modes.into(), output }).is_ok() {
        // SAFETY: `restore_at_exit` takes no arguments, does not unwind, and stays loaded until the process ends.
        unsafe { libc::atexit(restore_at_exit) };
    }
    true
}

/// Returns whether this program is in the foreground.
/// The system stops a background program that changes the terminal modes, so only a foreground program may do so.
pub fn is_foreground() -> bool {
    tcgetpgrp(stdin()).is_ok_and(|group| group == getpgrp())
}

/// Suspends the process group, as Ctrl-Z does, until the shell resumes it. The caller must restore the modes first.
pub fn stop_process() {
    let _ = kill(Pid::from_raw(0), Signal::SIGTSTP);
    // Another thread may receive the signal first, so wait until this thread is stopped as well.
    // If a fatal signal arrives while the program is stopped, the program usually ends here, before the caller changes
    // the modes again.
    std::thread::sleep(Duration::from_millis(100));
}

/// Restores the modes that [`save`] saved, resets the text style, and turns off bracketed paste.
/// Does nothing if this program is in the background.
///
/// Signal handlers call this function at any point of the program. It therefore does not allocate, lock or panic, and
/// calls only async-signal-safe functions.
pub(super) fn restore() {
    let Some(original) = ORIGINAL.get() else { return };
    // SAFETY: `tcgetpgrp` and `getpgrp` take no pointers.
    if unsafe { libc::tcgetpgrp(libc::STDIN_FILENO) != libc::getpgrp() } {
        return;
    }
    // SAFETY: `original.modes` is a valid termios that is never modified.
    unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &original.modes) };
    write("\x1b[0m\x1b[?2004l");
}

/// Restores the terminal modes on exit if they differ from the saved modes.
/// They differ, for example, if a second Ctrl-C ends the program during an answer,
/// while the key listener uses its own modes.
extern "C" fn restore_at_exit() {
    let Some(original) = ORIGINAL.get() else { return };
    let mut modes = original.modes;
    // SAFETY: `modes` is a valid termios, which `tcgetattr` may overwrite.
    let is_known = unsafe { libc::tcgetattr(libc::STDIN_FILENO, &mut modes) } == 0;
    let flags = |modes: &libc::termios| (modes.c_iflag, modes.c_oflag, modes.c_cflag, modes.c_lflag);
    if is_known && flags(&modes) != flags(&original.modes) {
        restore();
    }
}

/// Turns bracketed paste on or off. While it is on, the terminal marks the start and the end of pasted text.
pub fn set_bracketed_paste(on: bool) {
    write(if on { "\x1b[?2004h" } else { "\x1b[?2004l" });
}

/// Writes to the terminal without locking stdout or stderr, because another thread may hold the lock.
///
/// Gives up after 100 ms if output is paused (Ctrl-S). This function is async-signal-safe, like [`restore`].
fn write(text: &str) {
    let Some(output) = ORIGINAL.get().and_then(|original| original.output) else { return };
    let mut ready = libc::pollfd { fd: output, events: libc::POLLOUT, revents: 0 };
    // SAFETY: `ready` is one valid pollfd, and the count is 1.
    if unsafe { libc::poll(&mut ready, 1, 100) } > 0 {
        // SAFETY: the pointer and the length both come from `text`.
        unsafe { libc::write(output, text.as_ptr().cast(), text.len()) };
    }
}
