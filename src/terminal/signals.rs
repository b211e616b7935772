//! Handlers for signals that would end the program.

use std::ptr;
use std::sync::OnceLock;

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use super::modes;

/// The signal actions that [`restore_modes_on_end`] replaced, indexed by signal number. `None` for all other signals.
static PREVIOUS: OnceLock<[Option<libc::sigaction>; 64]> = OnceLock::new();

/// Makes a write beyond the file size limit (`ulimit -f`) fail. By default, SIGXFSZ would end the program.
///
/// Installs an empty handler, not `SIG_IGN`, which programs that inferno starts, such as $EDITOR, would inherit.
pub(super) fn survive_file_size_limit() {
    extern "C" fn do_nothing(_: libc::c_int) {}
    let action = SigAction::new(SigHandler::Handler(do_nothing), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: an empty handler is async-signal-safe.
    let _ = unsafe { sigaction(Signal::SIGXFSZ, &action) };
}

/// Installs handlers that restore the terminal modes when a signal ends the program.
pub(super) fn restore_modes_on_end() {
    let mut previous = [None; 64];
    for signal in Signal::iterator().filter(|signal| is_handled_here(*signal)) {
        let action = current_action(signal);
        // A signal that is ignored, as SIGHUP is under `nohup`, stays ignored.
        previous[signal as usize] = action.filter(|action| action.sa_sigaction != libc::SIG_IGN);
    }
    let previous = PREVIOUS.get_or_init(|| previous);
    // After a stack overflow, the handler must run on the alternate signal stack that Rust allocates for its threads.
    let flags = SaFlags::SA_SIGINFO | SaFlags::SA_ONSTACK;
    let action = SigAction::new(SigHandler::SigAction(restore_and_end), flags, SigSet::empty());
    for signal in Signal::iterator().filter(|signal| previous[*signal as usize].is_some()) {
        // SAFETY: the handler calls only async-signal-safe functions.
        let _ = unsafe { sigaction(signal, &action) };
    }
}

/// Returns true for the catchable signals that end the program by default, except SIGINT, SIGPIPE and SIGXFSZ.
fn is_handled_here(signal: Signal) -> bool {
    use Signal::*;
    let is_uncatchable = matches!(signal, SIGKILL | SIGSTOP);
    let has_other_default = matches!(signal, SIGCHLD | SIGCONT | SIGURG | SIGWINCH | SIGTSTP | SIGTTIN | SIGTTOU);
    // `interrupt` handles SIGINT. Rust ignores SIGPIPE. `survive_file_size_limit` handles SIGXFSZ.
    !is_uncatchable && !has_other_default && !matches!(signal, SIGINT | SIGPIPE | SIGXFSZ)
}

fn current_action(signal: Signal) -> Option<libc::sigaction> {
    // SAFETY: an all-zero sigaction is valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: with a null pointer as the new action, the call only writes the current action to `action`.
    (unsafe { libc::sigaction(signal as libc::c_int, ptr::null(), &mut action) } == 0).then_some(action)
}

/// Restores the terminal modes, then lets the signal end the program as it would without this handler.
extern "C" fn restore_and_end(number: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    modes::restore();
    // SAFETY: the system passes a valid siginfo to a handler with SA_SIGINFO.
    let is_from_kernel = unsafe { (*info).si_code } > 0;
    // A fault, such as an invalid memory access, recurs when this handler returns.
    // It then runs the previous action, such as Rust's stack overflow report.
    // Any other signal must be raised again. The raised signal stays pending until this handler returns.
    let recurs = is_from_kernel && matches!(number, libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE);
    let previous = PREVIOUS.get().and_then(|previous| previous[number as usize]).filter(|_| recurs);
    // SAFETY: an all-zero sigaction is the default action.
    let next = previous.unwrap_or(unsafe { std::mem::zeroed() });
    // SAFETY: `next` is a valid action. `sigaction` and `raise` are async-signal-safe.
    unsafe {
        libc::sigaction(number, &next, ptr::null_mut());
        if !recurs {
            libc::raise(number);
        }
    }
}
