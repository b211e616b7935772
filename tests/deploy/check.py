#!/usr/bin/env python3
"""Checks the files in deploy/ against the program and with the tools of their users.

    tests/deploy/check.py --program target/release/inferno

run.py installs the tools and calls this script. Requires PyYAML. Needs no network, GPU or cluster: the metrics come from a
demo server on the CPU that this script starts.
Uses kubectl or kustomize, kubernetes-validate, promtool, hadolint and docker-compose if they are installed. For each missing
tool, the output has a line `skipped: NAME`. Exits with 1 if a check fails.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

import manifests
import server

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
failures = []
missing = set()


def fail(message):
    failures.append(message)
    print(f"FAILED: {message}", flush=True)


def passed(what):
    print(f"passed: {what}", flush=True)


def check(what, problems):
    """Reports a check that found the given problems."""
    problems = list(problems)
    for problem in problems:
        fail(f"{what}: {problem}")
    if not problems:
        passed(what)


def run(what, *command, cwd=None, env=None):
    """Runs a tool. Returns its standard output, or None if it fails."""
    result = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    if result.returncode != 0:
        fail(f"{what}: exit code {result.returncode}\n{result.stdout}{result.stderr}")
        return None
    return result.stdout


def tool(name, args):
    """Returns the path of a tool, or None after saying that it is missing."""
    path = getattr(args, name.replace("-", "_"), None) or shutil.which(name)
    if path is None and name not in missing:
        missing.add(name)
        print(f"skipped: {name} is not installed", flush=True)
    return path


def read_yaml():
    """Returns the documents of each YAML file in deploy/."""
    files, problems = {}, []
    for path in sorted([*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")]):
        try:
            files[path] = [document for document in yaml.safe_load_all(path.read_text()) if document is not None]
        except yaml.YAMLError as error:
            problems.append(f"{path.relative_to(DEPLOY)}: {error}")
    check(f"{len(files)} YAML files parse", problems)
    return files


def check_kubernetes(files, args):
    """Builds the manifests with kustomize and checks their fields."""
    documents = [d for path, found in files.items() if KUBERNETES in path.parents for d in found]
    kubectl, kustomize = shutil.which("kubectl"), shutil.which("kustomize")
    if kubectl or kustomize:
        command = [kustomize, "build"] if kustomize else [kubectl, "kustomize"]
        for overlay in ("base", "inference-gateway"):
            what = f"kustomize build {overlay}"
            built = run(what, *command, str(KUBERNETES / overlay))
            if built is None:
                continue
            passed(what)
            found = list(yaml.safe_load_all(built))
            check(f"fields of the built {overlay}", manifests.problems(found))
            check(f"patches and names of the built {overlay}", manifests.rendered_problems(overlay, found))
            check_schemas(overlay, found, args)
    else:
        print("skipped: neither kubectl nor kustomize is installed", flush=True)
    check("fields of the manifests", manifests.problems(documents))
    pods = [manifests.pod_of_runtime(d) for d in documents if d.get("kind") == "ServingRuntime"]
    check_schemas("the pods of KServe", pods, args)
    check_custom_resources(documents, args)


def check_custom_resources(documents, args):
    """Validates the resources whose CRDs have a schema in the npm packages."""
    if args.node_modules is None:
        return
    script = Path(__file__).resolve().parent / "crds.mjs"
    command = ["node", script, args.node_modules]
    result = subprocess.run(
        command, input=json.dumps(documents), capture_output=True, text=True, timeout=120, check=False
    )
    lines = result.stdout.splitlines()
    valid = [line.removeprefix("ok ") for line in lines if line.startswith("ok ")]
    problems = [line for line in lines if not line.startswith("ok ")] or ([result.stderr] if result.returncode else [])
    check(f"schemas of {', '.join(sorted(valid))}", problems)


def check_schemas(overlay, documents, args):
    """Validates the resources whose schemas kubernetes-validate contains."""
    validate = tool("kubernetes-validate", args)
    if validate is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "core.yaml"
        core = [document for document in documents if manifests.is_built_in(document)]
        path.write_text(yaml.safe_dump_all(core))
        if run(f"schemas of {overlay}", validate, "--strict", str(path)) is not None:
            passed(f"schemas of {len(core)} resources in {overlay}; {len(documents) - len(core)} have no schema here")


def check_prometheus(args, metrics):
    promtool = tool("promtool", args)
    if promtool is None:
        return
    folder = DEPLOY / "prometheus"
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"],
                    ["check", "config", "--syntax-only", "prometheus.yml"]):
        what = "promtool " + " ".join(command)
        if run(what, promtool, *command, cwd=folder) is not None:
            passed(what)
    command = [promtool, "check", "metrics"]
    lint = subprocess.run(command, input=metrics, capture_output=True, text=True, timeout=60, check=False)
    check("promtool check metrics", [lint.stderr + lint.stdout] if lint.returncode else [])


def check_tests_of_alerts(files):
    """Checks that each alert has a test in which it fires."""
    rules = [rule["alert"] for group in files[DEPLOY / "prometheus/alerts.yml"][0]["groups"] for rule in group["rules"]]
    tests = files[DEPLOY / "prometheus/alerts_test.yml"][0]["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    check(f"{len(rules)} alerts have a test", [f"{rule} never fires in a test" for rule in rules if rule not in fired])


def check_metrics(exported):
    """Checks that the server has every metric that rules, dashboard and manifests name."""
    known, labels = server.names_and_labels(exported)
    json.loads((DEPLOY / "grafana/inferno.json").read_text())
    count, problems = 0, []
    for path in sorted(DEPLOY.rglob("*")):
        if path.suffix not in (".yaml", ".yml", ".json") or not path.is_file():
            continue
        for name, used in manifests.metric_names(path.read_text()):
            count += 1
            if name not in known:
                problems.append(f"{path.relative_to(DEPLOY)} names {name}, which /metrics lacks")
            for label in used - labels.get(name, set()):
                problems.append(f"{path.relative_to(DEPLOY)} uses the label {label}, which {name} lacks")
    check(f"{count} uses of metrics exist in /metrics", sorted(set(problems)))


def check_compose(compose, args):
    """Lets docker-compose read the compose file with and without the profile, and checks what it will start."""
    check("compose.yaml", manifests.compose_problems(compose))
    docker_compose = tool("docker-compose", args)
    if docker_compose is None:
        return
    environment = os.environ | {"INFERNO_API_KEY": "key", "MODEL": "org/model", "REVISION": "abc", "COMPUTE_CAP": "90"}
    for profile in ([], ["--profile", "two"]):
        what = " ".join(["docker-compose", *profile, "config"])
        command = [docker_compose, "-f", DEPLOY / "compose.yaml", *profile, "config", "--format", "json"]
        read = run(what, *command, env=environment)
        if read is not None:
            problems = manifests.read_compose_problems(json.loads(read), compose, bool(profile))
            check(what, problems)


def check_lists_of_replicas():
    """Checks the file of replicas for SMG, and that smg.sh refuses wrong arguments. The routing tests use both with SMG."""
    listed = json.loads((DEPLOY / "smg/workers.json").read_text())
    is_right = listed["version"] == 1 and all(set(worker) == {"url"} for worker in listed["workers"])
    check("workers.json", [] if is_right and listed["workers"] else ["it has other fields than version, workers and url"])
    for what, arguments, workers in (
        ("smg.sh refuses no replicas", [], ""),
        ("smg.sh refuses URLs beside a file", ["http://a:8000"], "workers.json"),
    ):
        environment = os.environ | {"SMG_WORKERS": workers}
        command = [DEPLOY / "smg/smg.sh", *arguments]
        result = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
        check(what, [] if result.returncode == 2 else [f"exit code {result.returncode}"])


def check_workflows():
    """Validates the workflows with the schema that check-jsonschema contains, and checks the scripts that they call."""
    package = importlib.util.find_spec("check_jsonschema")
    if package is None:
        print("skipped: check-jsonschema is not installed", flush=True)
        return
    import jsonschema  # not installed without check-jsonschema

    [folder] = package.submodule_search_locations
    schema = json.loads((Path(folder) / "builtin_schemas/vendor/github-workflows.json").read_text())
    repository = DEPLOY.parent
    for path in sorted((repository / ".github/workflows").glob("*.yml")):
        text = path.read_text()
        # YAML 1.1 reads the key `on` as a boolean.
        workflow = {("on" if key is True else key): value for key, value in yaml.safe_load(text).items()}
        errors = jsonschema.validators.validator_for(schema)(schema).iter_errors(workflow)
        problems = [f"{error.json_path}: {error.message[:200]}" for error in errors]
        scripts = set(re.findall(r"\bscripts/[\w/.-]+", text))
        problems += [f"{script} does not exist" for script in scripts if not (repository / script).exists()]
        check(f"schema and scripts of {path.name}", problems)


def check_docker(args):
    hadolint = tool("hadolint", args)
    for path in sorted(DEPLOY.rglob("Dockerfile")):
        what = f"hadolint {path.relative_to(DEPLOY)}"
        if hadolint and run(what, hadolint, str(path)) is not None:
            passed(what)
    text = (DEPLOY / "Dockerfile").read_text()
    needed = ['CMD ["inferno", "health"]', "\nUSER 65532", 'ENTRYPOINT ["inferno"]', "INFERNO_CACHE=/models"]
    check("Dockerfile", [f"lacks {line.strip()!r}" for line in needed if line not in text])
    scripts = sorted(DEPLOY.rglob("*.sh"))
    for path in scripts:
        run(f"sh -n {path.name}", "sh", "-n", str(path))
    problems = [f"{path.name} is not executable" for path in scripts if not os.access(path, os.X_OK)]
    check(f"{len(scripts)} shell scripts", problems)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--program", required=True, type=Path, help="the program inferno")
    parser.add_argument("--node-modules", help="the folder with the schemas of custom resources")
    for name in ("promtool", "hadolint", "kubernetes-validate", "docker-compose"):
        parser.add_argument(f"--{name}", help=f"path of {name} [from PATH]")
    args = parser.parse_args()
    program = args.program.resolve()

    files = read_yaml()
    check_kubernetes(files, args)
    check_compose(files[DEPLOY / "compose.yaml"][0], args)
    check_lists_of_replicas()
    check_workflows()
    count, problems = manifests.flag_problems(files, DEPLOY, program)
    check(f"{count} commands, flags and variables of inferno exist", problems)
    check_tests_of_alerts(files)
    check_docker(args)
    with server.Demo(program) as demo:
        metrics = demo.metrics_after_requests()
    check_metrics(metrics)
    check_prometheus(args, metrics)
    print(f"{len(failures)} checks failed" if failures else "all checks passed")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
