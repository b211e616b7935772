//! Keys that a person presses while an answer streams. The terminal passes them on one by one and unechoed, but still turns
//! Ctrl-C into a signal; however this ends, it is put back as it was.

use std::fs::File;
use std::io::{IsTerminal, Read, stdin};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::termios::{InputFlags, LocalFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr};

use super::terminal;
use super::typed::{Key, Typed};

/// Often enough that the end of an answer is not held up.
const TICK_MS: u8 = 20;
/// So many ticks without a byte, and the end of what was begun will not come.
const PATIENCE: usize = 25;

/// Listens until dropped.
pub struct Keys {
    seen: Arc<Seen>,
    before: Termios,
    thread: Option<JoinHandle<Typed>>,
}

#[derive(Default)]
struct Seen {
    folds: AtomicUsize,
    stops: AtomicUsize,
    end: AtomicBool,
}

impl Keys {
    /// What is typed goes behind what was `typed` before. That comes back where no person types.
    pub fn listen(typed: Typed) -> Result<Keys, Typed> {
        let Some((input, before)) = prepare() else { return Err(typed) };
        let mut now = before.clone();
        now.local_flags.remove(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::IEXTEN);
        now.input_flags.remove(InputFlags::ICRNL);
        // Ctrl-Z comes as a key, so that the terminal can be put back before the program stops.
        now.control_chars[SpecialCharacterIndices::VSUSP as usize] = nix::libc::_POSIX_VDISABLE;
        if tcsetattr(stdin().as_fd(), SetArg::TCSANOW, &now).is_err() {
            return Err(typed);
        }
        terminal::mark_pastes(true);
        let seen = Arc::new(Seen::default());
        let thread = std::thread::spawn({
            let (seen, before) = (seen.clone(), before.clone());
            move || read(input, typed, &seen, &before, &now)
        });
        Ok(Keys { seen, before, thread: Some(thread) })
    }

    /// How often Ctrl-O was pressed.
    pub fn presses(&self) -> usize {
        self.seen.folds.load(Ordering::Relaxed)
    }

    /// How often the program was stopped, and others may have written to the terminal.
    pub fn stops(&self) -> usize {
        self.seen.stops.load(Ordering::Relaxed)
    }

    /// Ends listening. Returns what was typed so far.
    pub fn end(mut self) -> Typed {
        self.stop()
    }

    fn stop(&mut self) -> Typed {
        self.seen.end.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return Typed::default() };
        let typed = thread.join();
        terminal::mark_pastes(false);
        let _ = tcsetattr(stdin().as_fd(), SetArg::TCSANOW, &self.before);
        typed.unwrap_or_default()
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        self.stop();
    }
}

fn prepare() -> Option<(File, Termios)> {
    if !stdin().is_terminal() {
        return None;
    }
    Some((File::from(stdin().as_fd().try_clone_to_owned().ok()?), tcgetattr(stdin().as_fd()).ok()?))
}

fn read(mut input: File, mut typed: Typed, seen: &Seen, before: &Termios, now: &Termios) -> Typed {
    let mut quiet = 0;
    // A paste that has begun is read to its end: the rest would be taken for lines that were typed.
    while !seen.end.load(Ordering::Relaxed) || (typed.is_open() && quiet < PATIENCE) {
        let mut waiting = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
        match poll(&mut waiting, PollTimeout::from(TICK_MS)) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => {
                typed.pause();
                quiet += 1;
                continue;
            }
            Ok(_) => quiet = 0,
            Err(_) => break,
        }
        let mut bytes = [0; 4096];
        let Ok(length @ 1..) = input.read(&mut bytes) else { break };
        for byte in &bytes[..length] {
            match typed.press(*byte) {
                Some(Key::Fold) => {
                    seen.folds.fetch_add(1, Ordering::Relaxed);
                }
                Some(Key::Suspend) => {
                    suspend(before, now);
                    seen.stops.fetch_add(1, Ordering::Relaxed);
                }
                None => {}
            }
        }
    }
    typed.close();
    typed
}

/// Stops the program as Ctrl-Z does elsewhere; in the background it then goes on without keys.
fn suspend(before: &Termios, now: &Termios) {
    terminal::mark_pastes(false);
    let _ = tcsetattr(stdin().as_fd(), SetArg::TCSANOW, before);
    terminal::stop();
    if terminal::is_ours() {
        let _ = tcsetattr(stdin().as_fd(), SetArg::TCSANOW, now);
        terminal::mark_pastes(true);
    }
}
