//! Runs the program on hostile input as a child process with limits on its time and memory.

use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::libc;

/// The maximum CPU time of the program, in seconds.
const MAX_SECONDS: f64 = 10.0;
/// The maximum wall-clock time. It exceeds [`MAX_SECONDS`], because other tests may slow the program down.
const HANG: Duration = Duration::from_secs(60);
/// The maximum resident memory, in bytes.
const MAX_BYTES: u64 = 1_000_000_000;
/// The value of RLIMIT_DATA in bytes. This limit also counts memory that the program allocates but never touches.
const MAX_DATA: libc::rlim_t = 1_500_000_000;
/// The maximum length of the stderr output of a failed program, in bytes.
const MAX_MESSAGE: usize = 2000;

/// The result of a program that stayed within the limits.
pub struct Bounded {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
    pub seconds: f64,
    pub peak_bytes: u64,
}

impl Bounded {
    /// Asserts that the program failed with exit code `code` and an error message that contains all `words`.
    #[track_caller]
    pub fn assert_fails(&self, code: i32, words: &[&str]) {
        assert_eq!(self.status.code(), Some(code), "{}\n{}", self.stdout, self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "the error does not contain {word:?}: {}", self.stderr);
        }
    }

    #[track_caller]
    pub fn assert_succeeds(&self) {
        assert_eq!(self.status.code(), Some(0), "{}\n{}", self.stdout, self.stderr);
    }
}

/// Runs a command without input.
///
/// Asserts that no signal or panic ends the command, and that stderr has no control characters except line breaks.
/// If the command fails, its stderr must have exactly one error and at most 2000 bytes.
/// Also asserts that the command uses at most 10 s of CPU time, 60 s of wall-clock time and 1 GB of resident memory.
/// The memory of child processes, such as the sandbox process, does not count. Their CPU time counts only if the
/// command takes longer than 10 s.
#[track_caller]
pub fn bounded(command: Command) -> Bounded {
    bounded_with_input(command, b"")
}

/// Runs a command with `input` on its standard input. Makes the same assertions as [`bounded`].
#[track_caller]
#[expect(clippy::zombie_processes, reason = "`wait` reaps the child with wait4")]
pub fn bounded_with_input(mut command: Command, input: &[u8]) -> Bounded {
    let name = format!("{command:?}");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Disable backtraces, because an error with a backtrace can be longer than `MAX_MESSAGE`.
    command.env("RUST_BACKTRACE", "0");
    // SAFETY: setrlimit is a plain system call, and the closure does not allocate.
    unsafe {
        command.pre_exec(|| {
            for (resource, limit) in [(libc::RLIMIT_DATA, MAX_DATA), (libc::RLIMIT_CORE, 0)] {
                let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
                if libc::setrlimit(resource, &limit) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        });
    }
    let start = Instant::now();
    let mut child = command.spawn().unwrap();
    let (mut stdin, input) = (child.stdin.take().unwrap(), input.to_vec());
    thread::spawn(move || stdin.write_all(&input));
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let stdout = thread::spawn(move || read(&mut stdout));
    let stderr = thread::spawn(move || read(&mut stderr));

    let pid = child.id() as libc::pid_t;
    let (mut peak_bytes, mut is_killed) = (0, false);
    let (status, cpu_seconds) = loop {
        peak_bytes = peak_resident_bytes(pid).unwrap_or(0).max(peak_bytes);
        if let Some(ended) = wait(pid) {
            break ended;
        }
        let is_over = cpu_seconds(pid).is_some_and(|seconds| seconds > MAX_SECONDS);
        if !is_killed && (is_over || start.elapsed() > HANG) {
            child.kill().unwrap();
            is_killed = true;
        }
        thread::sleep(Duration::from_millis(2));
    };
    let seconds = start.elapsed().as_secs_f64();
    let (stdout, stderr) = (stdout.join().unwrap(), stderr.join().unwrap());

    let shown: String = stderr.chars().take(4000).collect();
    assert!(!is_killed, "{name} was killed after {seconds:.1} s and {cpu_seconds:.1} s of CPU time\n{shown}");
    assert_eq!(status.signal(), None, "a signal ended {name}\n{shown}");
    assert_ne!(status.code(), Some(101), "{name} panicked\n{shown}");
    assert!(!stderr.contains("panicked at"), "{name} panicked\n{shown}");
    assert!(
        seconds <= MAX_SECONDS || cpu_seconds <= MAX_SECONDS,
        "{name} took {cpu_seconds:.1} s of CPU time\n{shown}"
    );
    assert!(peak_bytes <= MAX_BYTES, "{name} used {peak_bytes} bytes of memory\n{shown}");
    let has_controls = stderr.chars().any(|c| c != '\n' && c.is_control());
    assert!(!has_controls, "{name} wrote control characters to stderr\n{shown:?}");
    if !status.success() {
        assert!(stderr.len() <= MAX_MESSAGE, "{name} wrote {} bytes to stderr\n{shown}", stderr.len());
        let errors = stderr.lines().filter(|line| line.starts_with("error: ")).count();
        assert_eq!(errors, 1, "{name} must write exactly one error\n{shown}");
    }
    Bounded { status, stdout, stderr, seconds, peak_bytes }
}

fn read(stream: &mut impl Read) -> String {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the exit status and the CPU time in seconds if the process has ended, and reaps the process.
/// Otherwise, returns `None`.
fn wait(pid: libc::pid_t) -> Option<(ExitStatus, f64)> {
    let mut status = 0;
    // SAFETY: an all-zero rusage is valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are valid for the call. `pid` is a child that nothing else waits for.
    let ended = unsafe { libc::wait4(pid, &mut status, libc::WNOHANG, &mut usage) };
    assert!(ended >= 0, "cannot wait for the child process: {}", std::io::Error::last_os_error());
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    (ended == pid).then(|| (ExitStatus::from_raw(status), seconds(usage.ru_utime) + seconds(usage.ru_stime)))
}

/// Returns the peak resident memory of a process in bytes, or `None` before its `exec` and after its end.
/// `ru_maxrss` would include the time before `exec`, when the child is still a copy of the test process.
fn peak_resident_bytes(pid: libc::pid_t) -> Option<u64> {
    // Before `exec`, the child still runs the test binary.
    let program = std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    if std::env::current_exe().is_ok_and(|this| this == program) {
        return None;
    }
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
}

fn cpu_seconds(pid: libc::pid_t) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Skip the name of the program, which can contain spaces. Field 3 follows; utime and stime are fields 14 and 15.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    // SAFETY: sysconf only returns a number.
    let ticks_per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    Some(ticks as f64 / ticks_per_second as f64)
}
