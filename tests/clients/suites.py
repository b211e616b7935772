"""The suites of run.py. Each one starts a server, runs a client, and returns a summary. It raises if the client fails."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import scripted_model
from server import Server

HERE = Path(__file__).resolve().parent
HANG_SECONDS = 600


class Unavailable(Exception):
    """Something that a suite needs cannot be fetched."""


def answer(text, thought="I know the answer."):
    """Returns a script that thinks and then answers."""
    return f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>{text}<|return|>"


def call(tool, arguments, thought="I need a tool."):
    """Returns a script that thinks and then calls a tool."""
    return (
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>commentary to=functions.{tool} "
        f"<|constrain|>json<|message|>{arguments}<|call|>"
    )


def run(command, folder, **variables):
    """Runs a client. Raises with its output if it fails. Returns what it wrote to standard output."""
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]} exited with code {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check(server, most_connections):
    """Checks that no request failed because of the server, and that clients could reuse connections."""
    requests = server.requests()
    assert not [line for line in requests if " status=5" in line], requests
    connections = server.connections
    assert connections <= most_connections, f"{connections} connections: expected at most {most_connections}"
    return f"{len(requests)} requests on {connections} connections"


def openai(program, scratch, command, most_connections):
    """Runs a test program for an OpenAI client, with the URLs of two servers."""
    scripted_model.write(scratch, program, json.loads((HERE / "scripts.json").read_text()))
    with (
        Server(program, scratch, "--api-key", "secret") as server,
        Server(program, scratch, "--max-sequences", "1", "--queue", "0") as full_server,
    ):
        run([*command, server.url, full_server.url], scratch)
        return check(server, most_connections(server))


def openai_python(program, tools, scratch):
    def most_connections(server):
        # This client stops reading at `[DONE]` and closes the connection of a stream. All others it reuses.
        streams = sum(" stream=true" in line for line in server.requests())
        return 2 + streams  # the script creates two clients

    return openai(program, scratch, [tools.python, HERE / "openai_python.py"], most_connections)


def openai_node(program, tools, scratch):
    return openai(program, scratch, ["node", tools.node / "openai_node.mjs"], lambda _: 4)


def openai_schemas(program, tools, scratch):
    """Compares answers with OpenAI's and Anthropic's OpenAPI documents."""
    # It opens a connection for each request.
    return openai(program, scratch, [tools.python, HERE / "openai_schemas.py"], lambda server: len(server.requests()))


def receipts(program, tools, scratch):
    """Verifies signed receipts with another JOSE library, and lets inferno verify what that library signs."""
    scripts = [{"when": "Say hello", "play": answer("Hello.")}]
    scripted_model.write(scratch, program, scripts)
    key_file = scratch / "receipts.pem"
    create = "import sys; from jwcrypto.jwk import JWK; key = JWK.generate(kty='OKP', crv='Ed25519'); "
    create += "open(sys.argv[1], 'wb').write(key.export_to_pem(private_key=True, password=None))"
    run([tools.python, "-c", create, key_file], scratch)
    with Server(program, scratch, "--receipt-key", key_file) as server:
        run([tools.python, HERE / "receipts.py", server.url, program, key_file], scratch)
        return check(server, len(server.requests()))


RESPONSE = "/v1/responses"


def codex(program, tools, scratch):
    """Runs Codex with a provider of its configuration."""

    def flags(url):
        provider = f'{{name="inferno", base_url="{url}", wire_api="responses"}}'
        return settings({"model_provider": '"inferno"', "model_providers.inferno": provider})

    return write_report(program, tools, scratch, flags, lambda _: {}, [RESPONSE, RESPONSE])


def codex_oss(program, tools, scratch):
    """Runs `codex --oss`, which looks for the model with ollama's API."""
    flags = ["--oss", "--local-provider", "ollama"]
    paths = ["/v1/models", "/api/version", "/api/tags", RESPONSE, RESPONSE]
    return write_report(program, tools, scratch, lambda _: flags, lambda url: {"CODEX_OSS_BASE_URL": url}, paths)


def settings(values):
    """Returns the flags for settings of Codex."""
    return [part for name, value in values.items() for part in ("-c", f"{name}={value}")]


def write_report(program, tools, scratch, provider_flags, variables, paths):
    """Lets Codex run a command and answer from its output. It must send requests to `paths`, in this order."""
    command = "printf 'violet heron' > report.txt; cat report.txt"
    final = "I wrote the report about one bird."
    scripts = [
        {"when": "Write the report", "play": call("exec_command", json.dumps({"cmd": command, "login": False}))},
        {"when": "violet heron", "play": answer(final)},
    ]
    scripted_model.write(scratch, program, scripts)
    work, home = scratch / "work", scratch / "home"
    work.mkdir()
    home.mkdir()
    with Server(program, scratch, "--max-sequences", "4", "--context", str(scripted_model.CONTEXT)) as server:
        flags = [*provider_flags(server.url), *settings({"model_context_window": scripted_model.CONTEXT})]
        # The only command is the one above, so it needs no sandbox. Containers often cannot create one.
        flags += ["--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", "-C", work, "-m", scripted_model.NAME]
        command = [tools.program("codex"), "exec", *flags, "Write the report"]
        out = run(command, work, CODEX_HOME=home, **variables(server.url))
        sent = [re.search(' path="([^"]*)"', line)[1] for line in server.requests()]
        assert sent == paths, sent
        summary = check(server, len(paths))  # Codex opens a connection for each request
    events = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    [executed] = [item for item in items if item["type"] == "command_execution"]
    assert (executed["exit_code"], executed["aggregated_output"]) == (0, "violet heron"), executed
    assert [item["text"] for item in items if item["type"] == "agent_message"] == [final], items
    assert (work / "report.txt").read_text() == "violet heron"
    usage = events[-1]["usage"]
    assert usage["cached_input_tokens"] > 0 and usage["reasoning_output_tokens"] > 0, usage
    return summary


def gpt_oss(program, tools, scratch):
    """Runs the compatibility test of gpt-oss. Each of its cases needs one tool call with certain arguments."""
    source = tools.fetch("openai/gpt-oss", "7b583341fe16729127f6d5b94a7b09ccae97e1a1") / "compatibility-test"
    if not (source / "node_modules/.package-lock.json").exists():  # written last
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=source, check=True)
    folder = scratch / "suite"
    shutil.copytree(source, folder, symlinks=True, ignore=shutil.ignore_patterns("node_modules"))
    (folder / "node_modules").symlink_to(source / "node_modules")
    cases = [json.loads(line) for line in (folder / "cases.jsonl").read_text().splitlines()]
    scripts = [{"when": case["input"], "play": call(case["tool_name"], case["expected_arguments"])} for case in cases]
    # The tools always return the same texts. These are their beginnings.
    results = ['{"weather":', '{"status":', '{"html":', '{"language":', '{"image_png_base64":', '{"rows":']
    scripts += [{"when": result, "play": answer("Done.")} for result in results]
    scripted_model.write(scratch, program, scripts)
    tries = 5
    with Server(program, scratch) as server:
        provider = {
            "apiBaseUrl": server.url,
            "apiKey": "none",
            "apiType": ["responses", "chat"],
            "modelName": scripted_model.NAME,
            "providerDetails": {},
        }
        (folder / "providers.ts").write_text(f"export const PROVIDERS = {json.dumps({'inferno': provider})};\n")
        run([tools.program("tsx"), "index.ts", "--provider", "inferno", "-k", tries], folder)
        summary = check(server, 20)
    [rollout] = folder.glob("rollout_*.jsonl")
    runs = [json.loads(line) for line in rollout.read_text().splitlines()]
    failed = [entry for entry in runs if not entry.get("success")]
    assert len(runs) == 2 * tries * len(cases) and not failed, failed[:3]
    wrong = [entry for entry in runs if not entry["result"]["toolCallingDetails"]["calledToolWithRightArguments"]]
    assert not wrong, wrong[:3]
    return f"{len(runs)} runs, {summary}"


def open_responses(program, tools, scratch):
    """Runs the Open Responses compliance suite."""
    source = tools.fetch("openresponses/openresponses", "18e565604fdf7a08ad3a06bbc30d1ddaee999ea4")
    folder = scratch / "suite"
    folder.mkdir()
    for part in ("bin", "src"):
        (folder / part).symlink_to(source / part)
    weather = call("get_weather", '{"location":"San Francisco, CA"}')
    scripts = [
        {"when": "You are ChatGPT", "play": answer("Hello to you.")},
        # Without reasoning: some versions of the suite expect other event names for it than OpenAI's clients do.
        {"when": "Count from 1 to 5", "play": "<|channel|>final<|message|>1 2 3 4 5<|return|>"},
        {"when": "weather like in San Francisco", "play": weather},
        {"when": "temperature in San Francisco", "play": weather},
        {"when": "64 degrees and clear", "play": answer("It is 64 degrees.")},
    ]
    scripted_model.write(scratch, program, scripts)
    # The suite finds its packages next to its real path.
    packages = source / "node_modules"
    if not packages.exists():
        packages.symlink_to(tools.node / "node_modules")
    with Server(program, scratch, "--api-key", "secret") as server:
        flags = ["--base-url", server.url, "--api-key", "secret", "--model", scripted_model.NAME, "--json"]
        command = [tools.program("tsx"), "bin/compliance-test.ts", *flags]
        # The suite exits with 1 because inferno refuses images and files. It loses output that goes to a pipe.
        report, errors = scratch / "report.json", scratch / "errors"
        with report.open("w") as out, errors.open("w") as err:
            command = [str(part) for part in command]
            subprocess.run(command, cwd=folder, stdout=out, stderr=err, timeout=HANG_SECONDS, check=False)
        assert report.read_text().startswith("{"), errors.read_text()
        results = {result["id"]: result for result in json.loads(report.read_text())["results"]}
        check(server, len(results) + 4)
    for id in ("image-input", "file-input"):
        if id in results:
            refused = results.pop(id)
            assert refused["errors"][0].startswith("HTTP 400"), refused
    failed = [result for result in results.values() if result["status"] not in ("passed", "skipped")]
    assert not failed, json.dumps(failed, indent=1)[:4000]
    passed = [id for id, result in results.items() if result["status"] == "passed"]
    assert "basic-response" in passed, results
    return f"{len(passed)} tests passed"


ALL = {
    "openai-python": openai_python,
    "openai-node": openai_node,
    "openai-schemas": openai_schemas,
    "receipts": receipts,
    "codex": codex,
    "codex-oss": codex_oss,
    "gpt-oss": gpt_oss,
    "open-responses": open_responses,
}
