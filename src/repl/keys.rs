//! Reads keys while an answer streams: Ctrl-O, Ctrl-Z and the text of the next messages.
//!
//! While the listener runs, the terminal sends each key immediately and does not echo it. Ctrl-C still raises a signal.
//! When the listener stops, the terminal modes are restored.

use std::fs::File;
use std::io::{IsTerminal, Read, stdin};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::termios::{InputFlags, LocalFlags, SetArg, SpecialCharacterIndices, Termios, tcgetattr, tcsetattr};

use super::type_ahead::{Key, TypeAhead};
use crate::terminal::modes;

/// How long, in milliseconds, the listener waits for input before it checks again whether the answer has ended.
const TICK_MS: u8 = 20;
/// The number of waits of [`TICK_MS`] without input, half a second in total, after which the listener abandons an
/// incomplete key or paste. The limit applies only after the answer has ended.
const MAX_QUIET_TICKS: usize = 25;

/// A thread that listens for keys until it is stopped or dropped.
pub struct KeyListener {
    shared: Arc<KeyListenerState>,
    original_modes: Termios,
    thread: Option<JoinHandle<TypeAhead>>,
}

/// State that the listener thread shares with the [`KeyListener`].
#[derive(Default)]
struct KeyListenerState {
    toggles: AtomicUsize,
    suspensions: AtomicUsize,
    should_end: AtomicBool,
}

impl KeyListener {
    /// Starts listening. Appends the input to `type_ahead`.
    ///
    /// Returns `type_ahead` unchanged as the error if stdin is not a terminal or its modes cannot be changed.
    pub fn start(type_ahead: TypeAhead) -> Result<KeyListener, TypeAhead> {
        let Some((input, original_modes)) = open_terminal() else { return Err(type_ahead) };
        let mut modes = original_modes.clone();
        modes.local_flags.remove(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::IEXTEN);
        modes.input_flags.remove(InputFlags::ICRNL);
        // Receive Ctrl-Z as a key, so that the modes can be restored before the program is suspended.
        modes.control_chars[SpecialCharacterIndices::VSUSP as usize] = nix::libc::_POSIX_VDISABLE;
        if tcsetattr(stdin().as_fd(), SetArg::TCSANOW, &modes).is_err() {
            return Err(type_ahead);
        }
        modes::set_bracketed_paste(true);
        let shared = Arc::new(KeyListenerState::default());
        let thread = std::thread::spawn({
            let (shared, original_modes) = (shared.clone(), original_modes.clone());
            move || listen(input, type_ahead, &shared, &original_modes, &modes)
        });
        Ok(KeyListener { shared, original_modes, thread: Some(thread) })
    }

    /// Returns how many times the user has pressed Ctrl-O since the listener started.
    pub fn toggles(&self) -> usize {
        self.shared.toggles.load(Ordering::Relaxed)
    }

    /// Returns how many times the program has been suspended since the listener started.
    /// Other programs may write to the terminal during a suspension. The display then restarts below their output.
    pub fn suspensions(&self) -> usize {
        self.shared.suspensions.load(Ordering::Relaxed)
    }

    /// Stops listening. Returns all input that was typed ahead.
    pub fn stop(mut self) -> TypeAhead {
        self.join()
    }

    fn join(&mut self) -> TypeAhead {
        self.shared.should_end.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return TypeAhead::default() };
        let type_ahead = thread.join();
        modes::set_bracketed_paste(false);
        let _ = tcsetattr(stdin().as_fd(), SetArg::TCSANOW, &self.original_modes);
        type_ahead.unwrap_or_default()
    }
}

impl Drop for KeyListener {
    fn drop(&mut self) {
        self.join();
    }
}

fn open_terminal() -> Option<(File, Termios)> {
    if !stdin().is_terminal() {
        return None;
    }
    Some((File::from(stdin().as_fd().try_clone_to_owned().ok()?), tcgetattr(stdin().as_fd()).ok()?))
}

fn listen(
    mut input: File,
    mut type_ahead: TypeAhead,
    shared: &KeyListenerState,
    original_modes: &Termios,
    modes: &Termios,
) -> TypeAhead {
    let mut quiet_ticks = 0;
    // If the answer ends during a key or a paste, read the rest of it.
    // Otherwise, the prompt would read it as typed text, and treat line breaks in a paste as Enter.
    while !shared.should_end.load(Ordering::Relaxed) || (type_ahead.is_incomplete() && quiet_ticks < MAX_QUIET_TICKS) {
        let mut waiting = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
        match poll(&mut waiting, PollTimeout::from(TICK_MS)) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => {
                type_ahead.pause();
                quiet_ticks += 1;
                continue;
            }
            Ok(_) => quiet_ticks = 0,
            Err(_) => break,
        }
        let mut bytes = [0; 4096];
        let Ok(length @ 1..) = input.read(&mut bytes) else { break };
        for byte in &bytes[..length] {
            match type_ahead.push_byte(*byte) {
                Some(Key::ToggleReasoning) => {
                    shared.toggles.fetch_add(1, Ordering::Relaxed);
                }
                Some(Key::Suspend) => {
                    suspend(original_modes, modes);
                    shared.suspensions.fetch_add(1, Ordering::Relaxed);
                }
                None => {}
            }
        }
    }
    type_ahead.abandon_incomplete();
    type_ahead
}

/// Suspends the program, as Ctrl-Z usually does. Sets `modes` again only if the program resumes in the foreground.
fn suspend(original_modes: &Termios, modes: &Termios) {
    modes::set_bracketed_paste(false);
    let _ = tcsetattr(stdin().as_fd(), SetArg::TCSANOW, original_modes);
    modes::stop_process();
    if modes::is_foreground() {
        let _ = tcsetattr(stdin().as_fd(), SetArg::TCSANOW, modes);
        modes::set_bracketed_paste(true);
    }
}
