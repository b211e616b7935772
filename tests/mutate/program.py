"""Runs inferno with limits on time and memory, and checks the result."""

import collections
import os
import re
import resource
import signal
import subprocess
import time
import unicodedata

# The maximum CPU time in seconds, and the value of RLIMIT_DATA in bytes, both as in tests/it/support/bounded.rs.
MAX_SECONDS = 10
MAX_DATA = 1_500_000_000
# The script kills the program after this many seconds of wall-clock time, as in tests/it/support/bounded.rs.
# The limit is longer than MAX_SECONDS, because the program gets only part of a core on a busy machine.
HANG_SECONDS = 60
MAX_RESIDENT = 1_500_000_000
MAX_MESSAGE = 5000
# The exit codes 0 to 11 of docs/reference.md. The script never interrupts the program, so 130 (Ctrl-C) is a failure.
EXIT_CODES = range(12)


def limit():
    """Sets resource limits for the program. The child process calls this function before exec."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, HANG_SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA, MAX_DATA))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


Result = collections.namedtuple("Result", "code signal is_killed seconds cpu_seconds resident stdout stderr")


def environment(home):
    return {"PATH": "/usr/bin:/bin", "HOME": str(home), "INFERNO_CACHE": str(home / "models"),
            "HF_ENDPOINT": "http://127.0.0.1:1", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "RUST_BACKTRACE": "0"}


def execute(program, arguments, home, scratch):
    """Runs the program in `home` without input, and kills it after HANG_SECONDS. Returns a Result."""
    with open(scratch / "stdout", "w+b") as stdout, open(scratch / "stderr", "w+b") as stderr:
        start = time.monotonic()
        child = subprocess.Popen([program, *arguments], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                                 cwd=home, env=environment(home), start_new_session=True,
                                 preexec_fn=limit)  # noqa: PLW1509 - this process has no threads
        is_killed, ended = False, 0
        while not ended:
            ended, status, usage = os.wait4(child.pid, os.WNOHANG)
            if not ended and not is_killed and time.monotonic() - start > HANG_SECONDS:
                os.kill(child.pid, signal.SIGKILL)
                is_killed = True
            if not ended:
                time.sleep(0.002)
        seconds = time.monotonic() - start
        child.returncode = 0 # os.wait4 has reaped the child, so Popen must not wait for it
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read(16 << 20).decode("utf-8", "replace"))
    code = os.waitstatus_to_exitcode(status)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Result(code, -code if code < 0 else None, is_killed, seconds, cpu_seconds, usage.ru_maxrss * 1024, *texts)


def unprintable(text, allowed):
    """Returns the control characters and invisible characters that occur in a text, except those in `allowed`."""
    kinds = {"Cc", "Cf", "Zl", "Zp"}
    found = {character for character in text if unicodedata.category(character) in kinds}
    return sorted(found - set(allowed))


def complaints(result, arguments):
    """Returns a description of each check that a result fails."""
    found = []
    is_table = arguments[0] in ("show", "list", "verify", "tokenize") and "--json" not in arguments
    errors = sum(line.startswith("error:") for line in result.stderr.splitlines())
    if result.is_killed:
        found.append(f"did not end within {HANG_SECONDS} s")
    elif result.signal:
        found.append(f"ended by signal {result.signal}")
    elif result.code not in EXIT_CODES:
        found.append(f"exit code {result.code}")
    if "panicked" in result.stderr:
        found.append("panicked")
    if result.cpu_seconds > MAX_SECONDS and result.seconds > MAX_SECONDS:
        found.append(f"took {result.seconds:.1f} s")
    if result.resident > MAX_RESIDENT:
        found.append(f"used {result.resident >> 20} MiB of memory")
    if errors > 1 or (errors == 0 and result.code != 0):
        found.append(f"wrote {errors} error messages")
    if len(result.stderr.encode()) > MAX_MESSAGE:
        found.append(f"wrote {len(result.stderr.encode())} bytes to stderr")
    if unprintable(result.stderr, "\n"):
        found.append(f"wrote {unprintable(result.stderr, chr(10))!a} to stderr")
    if is_table and unprintable(result.stdout, "\n\t"):
        found.append(f"wrote {unprintable(result.stdout, chr(10) + chr(9))!a} to stdout")
    if arguments[0] == "perplexity" and result.code == 0 and re.search(r"\bnan\b", result.stdout, re.IGNORECASE):
        found.append("reported a perplexity that is NaN")
    return found
