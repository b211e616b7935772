"""Rules for the files in deploy/ that no tool checks."""

import re
import subprocess
from pathlib import Path

BUILT_IN = {"v1", "apps/v1", "policy/v1", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1"}
REQUIRED = {
    "InferencePool": [("spec", "selector", "matchLabels"), ("spec", "targetPorts"), ("spec", "endpointPickerRef", "name"),
                      ("spec", "endpointPickerRef", "port", "number")],
    "HTTPRoute": [("spec", "parentRefs"), ("spec", "rules")],
    "EndpointPickerConfig": [("plugins",), ("schedulingProfiles",)],
    "PodMonitor": [("spec", "selector", "matchLabels"), ("spec", "podMetricsEndpoints")],
    "ScaledObject": [("spec", "scaleTargetRef", "name"), ("spec", "triggers"), ("spec", "maxReplicaCount")],
    "ServingRuntime": [("spec", "supportedModelFormats"), ("spec", "containers")],
    "PodDisruptionBudget": [("spec", "selector", "matchLabels"), ("spec", "maxUnavailable")],
    "PersistentVolumeClaim": [("spec", "accessModes"), ("spec", "resources", "requests", "storage")],
    "Service": [("spec", "selector"), ("spec", "ports")],
    "Deployment": [("spec", "selector", "matchLabels"), ("spec", "template", "spec", "containers")],
}
# Labels that Prometheus adds to every series, and the bounds of histograms.
TARGET_LABELS = {"job", "instance", "le"}


def get(value, *path):
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def is_built_in(document):
    return document.get("apiVersion") in BUILT_IN


def problems(documents):
    """Yields what is wrong with Kubernetes resources."""
    for document in documents:
        kind, name = document.get("kind"), get(document, "metadata", "name")
        title = f"{kind} {name}"
        if not kind or not document.get("apiVersion"):
            yield f"{title} lacks kind or apiVersion"
        if kind not in ("Kustomization", "EndpointPickerConfig") and not name:
            yield f"{title} lacks a name"
        for path in REQUIRED.get(kind, []):
            if not get(document, *path):
                yield f"{title} lacks {'.'.join(path)}"
        if kind == "Deployment" and get(document, "spec", "template", "spec"):
            labels = get(document, "spec", "template", "metadata", "labels") or {}
            if not (get(document, "spec", "selector", "matchLabels") or {}).items() <= labels.items():
                yield f"{title}: the selector does not match the template"
            yield from pod_problems(title, document["spec"]["template"]["spec"])
        if kind == "ServingRuntime":
            yield from pod_problems(title, document["spec"])
        if kind == "EndpointPickerConfig":
            yield from picker_problems(title, document)
    pods = [get(d, "spec", "template", "metadata", "labels") for d in documents if d.get("kind") == "Deployment"]
    for document in documents:
        if document.get("kind") in ("Service", "InferencePool", "PodMonitor", "PodDisruptionBudget"):
            selector = get(document, "spec", "selector") or {}
            selector = selector.get("matchLabels", selector)
            if sum(selector.items() <= (labels or {}).items() for labels in pods) != 1:
                yield f"{document['kind']} {get(document, 'metadata', 'name')} does not select exactly one Deployment"


def picker_problems(title, config):
    """Yields what is wrong with the profiles and the engines of an endpoint picker."""
    plugins = [plugin.get("type") for plugin in config.get("plugins", [])]
    for profile in config.get("schedulingProfiles", []):
        for plugin in profile.get("plugins", []):
            if plugin.get("pluginRef") not in plugins:
                yield f"{title}: the profile {profile.get('name')} uses the unknown plugin {plugin.get('pluginRef')}"
    extractors = [plugin for plugin in config.get("plugins", []) if plugin.get("type") == "core-metrics-extractor"]
    for extractor in extractors:
        engines = [engine.get("name") for engine in get(extractor, "parameters", "engineConfigs") or []]
        if get(extractor, "parameters", "defaultEngine") not in engines:
            yield f"{title}: the default engine is not one of {engines}"
    if not extractors:
        yield f"{title} does not name the metrics of inferno"


def pod_of_runtime(runtime):
    """Returns the pod that KServe makes of a ServingRuntime, which has the same fields as a pod."""
    fields = ("containers", "volumes", "nodeSelector", "tolerations")
    spec = {name: runtime["spec"][name] for name in fields if name in runtime["spec"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": runtime["metadata"]["name"]}, "spec": spec}


def pod_problems(title, pod):
    """Yields what is wrong with a pod: its security, and the probes and times of inferno's server."""
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        where = f"{title}, container {container.get('name')}"
        security = container.get("securityContext") or {}
        if security.get("readOnlyRootFilesystem") is not True or security.get("allowPrivilegeEscalation") is not False:
            yield f"{where} can write its root file system or gain privileges"
        if not (security.get("runAsNonRoot") or get(pod, "securityContext", "runAsNonRoot")):
            yield f"{where} may run as root"
        if get(security, "capabilities", "drop") != ["ALL"]:
            yield f"{where} keeps capabilities"
        args = container.get("args", [])
        if args[:1] == ["serve"]:
            yield from server_problems(where, pod, container, args)
    servers = [container for container in pod["containers"] if container.get("args", [])[:1] == ["serve"]]
    if servers and "initContainers" in pod:
        for wanted in ("download", "verify"):
            found = [c["args"] for c in pod["initContainers"] if c.get("args", [])[:1] == [wanted]]
            if not found or "--revision" not in found[0]:
                yield f"{title} does not {wanted} a pinned revision before it starts"


def server_problems(where, pod, container, args):
    expected = {"startupProbe": "/health", "readinessProbe": "/health", "livenessProbe": "/live"}
    for probe, path in expected.items():
        if get(container, probe, "httpGet", "path") != path:
            yield f"{where}: {probe} does not ask {path}"
    readiness = container.get("readinessProbe", {})
    noticed = readiness.get("periodSeconds", 10) * readiness.get("failureThreshold", 3)
    noticed += readiness.get("timeoutSeconds", 1)
    delay, drain = (float(args[args.index(flag) + 1]) if flag in args else 0 for flag in ("--drain-delay", "--drain-timeout"))
    if noticed >= delay:
        yield f"{where}: the readiness probe needs {noticed} s to fail, but --drain-delay is {delay:g} s"
    # A ServingRuntime has no grace period: the InferenceService sets it.
    grace = pod.get("terminationGracePeriodSeconds")
    if grace is not None and grace <= delay + drain or not drain:
        yield f"{where}: the grace period of {grace} s is not longer than --drain-delay and --drain-timeout"
    if not get(container, "resources", "limits", "nvidia.com/gpu"):
        yield f"{where} has no GPU"
    for mount in container.get("volumeMounts", []):
        if mount["mountPath"] == "/models" and not mount.get("readOnly"):
            yield f"{where} can write the models"


def compose_problems(compose):
    """Yields what is wrong with the compose file."""
    services = compose["services"]
    if {name for name, service in services.items() if "profiles" not in service} != {"download", "inferno"}:
        yield "without a profile, it does not start exactly one replica"
    for name, service in services.items():
        if service.get("profiles", ["two"]) != ["two"]:
            yield f"{name} has an unknown profile"
        if not ("image" in service or "build" in service):
            yield f"{name} has neither image nor build"
        for port in service.get("ports", []):
            if not port.startswith("127.0.0.1:"):
                yield f"{name} opens the port {port} to other machines"
        image = service.get("image", "x:1")
        if ":" not in image or image.endswith(":latest"):
            yield f"{name} does not pin the version of its image"
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if not source.startswith(".") and source not in compose["volumes"]:
                yield f"{name} mounts the unknown volume {source}"
        # Compose can put only files into a read-only container.
        sources = [compose["secrets"].get(secret, {}) for secret in service.get("secrets", [])]
        if service.get("read_only") and any("file" not in source for source in sources):
            yield f"{name} is read-only, but has a secret that is not a file"
        for secret in service.get("secrets", []):
            if secret not in compose["secrets"]:
                yield f"{name} uses the unknown secret {secret}"
        if service.get("command", [None])[0] == "serve" and int(service["stop_grace_period"].rstrip("s")) <= 160:
            yield f"{name} is killed before it has drained"


def read_compose_problems(read, compose, has_profile):
    """Yields what is wrong with the output of `docker-compose config`: services, variables and files of the host."""
    wanted = {name for name, service in compose["services"].items() if has_profile or "profiles" not in service}
    if set(read["services"]) != wanted:
        yield f"it starts {sorted(read['services'])} instead of {sorted(wanted)}"
    for name, service in read["services"].items():
        if (service.get("command") or [None])[0] in ("serve", "download"):
            if service["command"][1:4] != ["org/model", "--revision", "abc"]:
                yield f"{name} ignores MODEL or REVISION: {service['command']}"
            if service["build"]["args"] != {"COMPUTE_CAP": "90"}:
                yield f"{name} ignores COMPUTE_CAP: {service['build']['args']}"
        build = service.get("build")
        if build and not (Path(build["context"]) / build["dockerfile"]).exists():
            yield f"{name} has no Dockerfile in {build['context']}"
        for mount in service.get("volumes", []):
            if mount["type"] == "bind" and not Path(mount["source"]).exists():
                yield f"{name} mounts {mount['source']}, which does not exist"


def rendered_problems(overlay, documents):
    """Yields what is wrong with the output of kustomize: generated names, images, and the patches of inference-gateway."""
    configs = {get(d, "metadata", "name") for d in documents if d["kind"] == "ConfigMap"}
    for document in documents:
        if document["kind"] != "Deployment":
            continue
        name, pod = document["metadata"]["name"], document["spec"]["template"]["spec"]
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            if "/" not in container["image"] or ":" not in container["image"]:
                yield f"{name}: kustomize did not replace the image {container['image']}"
            for source in container.get("envFrom", []):
                if source["configMapRef"]["name"] not in configs:
                    yield f"{name}: no ConfigMap {source['configMapRef']['name']}"
        for volume in pod.get("volumes", []):
            if "configMap" in volume and volume["configMap"]["name"] not in configs:
                yield f"{name}: no ConfigMap {volume['configMap']['name']}"
        if name == "inferno":
            [server] = pod["containers"]
            variables = {variable["name"] for variable in server["env"]}
            wanted = {"INFERNO_API_KEY"} if overlay == "base" else {"INFERNO_NO_AUTH"}
            if variables & {"INFERNO_API_KEY", "INFERNO_NO_AUTH"} != wanted:
                yield f"{name}: the variables {sorted(variables)} do not contain exactly {sorted(wanted)}"
    for monitor in (d for d in documents if d["kind"] == "PodMonitor"):
        if ("authorization" in monitor["spec"]["podMetricsEndpoints"][0]) != (overlay == "base"):
            yield "PodMonitor: its key does not match the Deployment"


def commands(value):
    """Yields every list of arguments of inferno in a document."""
    if isinstance(value, dict):
        for child in value.values():
            yield from commands(child)
    elif isinstance(value, list):
        if value[:1] and value[0] in ("serve", "download", "verify", "health"):
            yield [str(word) for word in value]
        elif value[:1] == ["inferno"]:
            yield [str(word) for word in value[1:]]
        else:
            for child in value:
                yield from commands(child)


def flag_problems(files, deploy, program):
    """Returns how many commands, flags and variables of inferno deploy/ uses, and those that the program lacks."""
    help_texts, found, count = {}, [], 0

    def help_text(command):
        if command not in help_texts:
            result = subprocess.run(
                [program, command, "--help"], capture_output=True, text=True, timeout=60, check=False
            )
            help_texts[command] = result.stdout if result.returncode == 0 else None
        return help_texts[command]

    used = [(path, command) for path, documents in files.items() for command in commands(documents)]
    for path in sorted(deploy.rglob("Dockerfile")):
        for words in re.findall(r'^(?:HEALTHCHECK .*)?CMD \[(.*)\]', path.read_text(), re.MULTILINE):
            words = re.findall(r'"([^"]*)"', words)
            used.append((path, words[1:] if words[0] == "inferno" else words))
    for path, command in used:
        count += 1
        text = help_text(command[0])
        if text is None:
            found.append(f"{path.relative_to(deploy)}: inferno has no command {command[0]}")
            continue
        for word in command[1:]:
            if word.startswith("--"):
                count += 1
                if not re.search(rf"(?<![\w-]){re.escape(word.split('=')[0])}(?![\w-])", text):
                    found.append(f"{path.relative_to(deploy)}: inferno {command[0]} has no flag {word}")
    others = {"INFERNO_CACHE", "INFERNO_CONFIG", "INFERNO_NOHISTORY", "INFERNO_EXTRA_COMPUTE_CAPS"}
    for path in sorted(path for path in deploy.rglob("*") if path.is_file()):
        for variable in sorted(set(re.findall(r"\bINFERNO_[A-Z_]+", path.read_text())) - others):
            count += 1
            flag = "--" + variable.removeprefix("INFERNO_").lower().replace("_", "-")
            if not re.search(rf"(?<![\w-]){flag}(?![\w-])", help_text("serve")):
                found.append(f"{path.relative_to(deploy)}: {variable} has no flag {flag}")
    return count, found


def metric_names(text):
    """Yields each metric of inferno in a file, with the labels that its selector names."""
    text = text.replace('\\"', '"')
    for match in re.finditer(r"\b(inferno_[a-z0-9_]+)\b(?:\{([^{}]*)\})?", text):
        labels = set(re.findall(r'(\w+)\s*(?:=~|!=|!~|=)\s*"', match.group(2) or ""))
        yield match.group(1), labels - TARGET_LABELS
