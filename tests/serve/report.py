"""Collects the rows of a report and writes them as JSON."""

import datetime
import json
import os
import platform
import subprocess
import sys
import time


class Report:
    """The rows of a report. Each row says what was tested, the target, the figure, and whether the test passed."""

    def __init__(self, options):
        self.options = options
        self.rows = []
        self.server = {}
        self.started = time.monotonic()

    def add(self, name, target, figure, passed, is_speed=False, **details):
        """Adds a row and prints it.

        `figure` is the measured value as text. `details` are additional figures.
        `is_speed` says whether the figure depends on the speed of the machine.
        """
        details = {key: round(value, 6) if isinstance(value, float) else value for key, value in details.items()}
        row = {"name": name, "target": target, "figure": figure, "passed": bool(passed), "is_speed": is_speed}
        self.rows.append(row | {"details": details})
        print(f"{'pass' if passed else 'FAIL'}  {name}: {figure}  (target: {target})", flush=True)

    def skip(self, name, target, reason):
        """Adds a row without a figure, for a test that cannot run on this machine."""
        row = {"name": name, "target": target, "figure": None, "passed": None, "is_speed": False}
        self.rows.append(row | {"details": {"reason": reason}})
        print(f"skip  {name}: {reason}", flush=True)

    def write(self, path):
        """Writes the report to `path`, if it is given. Returns True if no row failed.

        With --any-speed, failed rows that measure a speed do not change the result.
        """
        failed = [row["name"] for row in self.rows if row["passed"] is False]
        result = {
            "command": command(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "inferno": self.server,
            "machine": machine(),
            "seconds": round(time.monotonic() - self.started, 1),
            "failed": failed,
            "rows": self.rows,
        }
        if path:
            with open(path, "w") as file:
                json.dump(result, file, indent=2, ensure_ascii=False)
                file.write("\n")
        print(f"{len(self.rows) - len(failed)} of {len(self.rows)} rows passed or were skipped; {result['seconds']} s")
        return all(row["is_speed"] and self.options.any_speed for row in self.rows if row["passed"] is False)


def command():
    """Returns the command line that started the script, with the script's path in the repository."""
    return " ".join(["tests/serve/" + os.path.basename(sys.argv[0]), *sys.argv[1:]])


def describe(server):
    """Returns the version, the model and the context length of a server."""
    models = json.loads(server.get("/v1/models")[1])["data"][0]
    command = [server.process.args[0], "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {"version": version, "model": models["id"], "context": models["max_model_len"]}


def machine():
    """Returns the processor, the number of usable hardware threads, the memory, the GPUs and the load average."""
    cpu, memory = platform.processor(), 0
    with open("/proc/cpuinfo") as file:
        cpu = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), cpu)
    with open("/proc/meminfo") as file:
        memory = int(file.readline().split()[1]) * 1024
    gpus = []
    try:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        pass  # nvidia-smi is missing or finds no GPU
    threads = len(os.sched_getaffinity(0))
    load = [round(value, 2) for value in os.getloadavg()]
    return {"cpu": cpu, "threads": threads, "memory_bytes": memory, "gpus": gpus, "load_average": load}
