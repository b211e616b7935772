"""Runs clients in another process, so that they do not delay the process that measures."""

import asyncio
import multiprocessing
import resource

# The maximum time to wait for a message from the client process, in seconds.
LIMIT_SECONDS = 300


class Background:
    """Runs `function(session, *arguments)` in another process, the client process. Use it in a `with` statement.

    The body of the `with` statement starts when the function calls `session.ready()`.
    At the end of the body, `session.stopped()` returns in the client process, and the function should return too.
    After the `with` statement, the attribute `result` has the return value of the function.
    Raises ChildProcessError if the function fails, and TimeoutError if it takes longer than LIMIT_SECONDS to get ready
    or to return. If the body fails, kills the client process without waiting for a result.
    """

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments
        self.pipe = self.process = self.result = None

    def start(self):
        """Starts the process. Call this before the `with` statement if several processes should get ready at once."""
        context = multiprocessing.get_context("fork")
        self.pipe, child = context.Pipe()
        self.process = context.Process(target=run, args=(child, self.function, self.arguments), daemon=True)
        self.process.start()
        child.close()  # otherwise, `receive` would not notice that the client process has ended

    def __enter__(self):
        if self.process is None:
            self.start()
        try:
            self.receive("ready")
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, error, *_):
        try:
            if error is None:
                self.result = self.stop()
        finally:
            self.end()

    def stop(self):
        """Tells the function to stop, and waits for its result. Returns the result."""
        try:
            self.pipe.send(("stop", None))
        except BrokenPipeError:
            pass  # the function has failed; `receive` reports the reason
        result = self.receive("result")
        self.process.join(30)
        return result

    def receive(self, expected):
        """Waits for a message of the kind `expected`. Returns the value in the message."""
        if not self.pipe.poll(LIMIT_SECONDS):
            raise TimeoutError(f"the client process did not send {expected!r} within {LIMIT_SECONDS} s")
        try:
            kind, value = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise ChildProcessError(f"the client process ended before it sent {expected!r}") from None
        if kind == "error":
            raise ChildProcessError(f"the client process failed: {value}")
        if kind != expected:
            raise ChildProcessError(f"the client process sent {kind!r} instead of {expected!r}")
        return value

    def end(self):
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Session:
    """The client process's connection to the measuring process. The function gets it as its first argument."""

    def __init__(self, pipe):
        self.pipe = pipe

    def ready(self):
        """Tells the measuring process to start the measurement."""
        self.pipe.send(("ready", None))

    async def stopped(self):
        """Waits until the measurement ends."""
        await asyncio.get_running_loop().run_in_executor(None, self.pipe.recv)


def run(pipe, function, arguments):
    raise_file_limit()
    try:
        message = "result", asyncio.run(function(Session(pipe), *arguments))
    except Exception as error:  # noqa: BLE001 - the parent process raises it
        message = "error", f"{type(error).__name__}: {error}"
    pipe.send(message)


def raise_file_limit():
    """Raises the soft limit on open files to the hard limit. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
