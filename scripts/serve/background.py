"""Runs clients in another process, so that they do not slow down the process that measures."""

import asyncio
import multiprocessing
import resource


class Background:
    """Runs `function(session, *arguments)` in another process. Use it in a `with` statement.

    The body of the `with` statement starts when the function calls `session.ready()`. At the end of the body,
    `session.stopped()` returns in the other process. `result` is then the return value of the function.
    """

    def __init__(self, function, *arguments):
        self.pipe, child = multiprocessing.Pipe()
        self.result = None
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=run, args=(child, function, arguments), daemon=True)

    def __enter__(self):
        self.process.start()
        self.pipe.recv()
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Tells the function to stop, and waits for its result."""
        if self.process is not None:
            self.pipe.send("stop")
            self.result = self.pipe.recv()
            self.process.join(30)
            self.process = None
        return self.result


class Session:
    """The connection to the measuring process. It is the first argument of the function in the other process."""

    def __init__(self, pipe):
        self.pipe = pipe

    def ready(self):
        """Tells the measuring process to start the measurement."""
        self.pipe.send("ready")

    async def stopped(self):
        """Waits until the measurement ends."""
        await asyncio.get_running_loop().run_in_executor(None, self.pipe.recv)


def run(pipe, function, arguments):
    raise_file_limit()
    pipe.send(asyncio.run(function(Session(pipe), *arguments)))


def raise_file_limit():
    """Raises the limit on open files as far as possible. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
