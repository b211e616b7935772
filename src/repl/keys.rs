//! Keys that a person presses while an answer streams. The terminal passes them on one by one and unechoed, but still turns
//! Ctrl-C into a signal; however this ends, it is put back as it was.

use std::fs::File;
use std::io::{IsTerminal, Read, stdin};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};

/// The terminal as it was, while it is not so.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

const CTRL_O: u8 = 0x0f;

/// Listens until dropped.
pub struct Keys {
    presses: Arc<AtomicUsize>,
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<Vec<u8>>>,
}

impl Keys {
    /// None where no person types.
    pub fn listen() -> Option<Keys> {
        if !stdin().is_terminal() {
            return None;
        }
        let input = File::from(stdin().as_fd().try_clone_to_owned().ok()?);
        let before = tcgetattr(stdin().as_fd()).ok()?;
        let mut now = before.clone();
        now.local_flags.remove(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::IEXTEN);
        *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before);
        tcsetattr(stdin().as_fd(), SetArg::TCSANOW, &now).ok()?;
        let (presses, end) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let thread = std::thread::spawn({
            let (presses, end) = (presses.clone(), end.clone());
            move || read(input, &presses, &end)
        });
        Some(Keys { presses, end, thread: Some(thread) })
    }

    /// How often Ctrl-O was pressed.
    pub fn presses(&self) -> usize {
        self.presses.load(Ordering::Relaxed)
    }

    /// Ends listening. Returns what was typed meanwhile: the beginning of the next message.
    pub fn end(mut self) -> String {
        let typed = self.stop();
        String::from_utf8_lossy(&typed).chars().filter(|c| *c == '\n' || !c.is_control()).collect()
    }

    fn stop(&mut self) -> Vec<u8> {
        self.end.store(true, Ordering::Relaxed);
        let typed = self.thread.take().and_then(|thread| thread.join().ok());
        restore();
        typed.unwrap_or_default()
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Puts the terminal back: also for whoever ends the process at once.
pub fn restore() {
    if let Some(before) = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take() {
        let _ = tcsetattr(stdin().as_fd(), SetArg::TCSANOW, &before);
    }
}

fn read(mut input: File, presses: &AtomicUsize, end: &AtomicBool) -> Vec<u8> {
    let mut typed = Vec::new();
    while !end.load(Ordering::Relaxed) {
        let mut waiting = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
        // Often enough that the end of an answer is not held up.
        match poll(&mut waiting, PollTimeout::from(20u8)) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => continue,
            Ok(_) => {}
            Err(_) => break,
        }
        let mut bytes = [0; 256];
        match input.read(&mut bytes) {
            Ok(0) | Err(_) => break,
            Ok(read) => {
                presses.fetch_add(bytes[..read].iter().filter(|byte| **byte == CTRL_O).count(), Ordering::Relaxed);
                typed.extend(bytes[..read].iter().filter(|byte| **byte != CTRL_O));
            }
        }
    }
    typed
}
