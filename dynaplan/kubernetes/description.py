"""A deployment of this box, described for a cluster: each service's arguments, pods, environment and secrets.

Three things are different there. A pod has whole GPUs. KV entries move between pods only with vLLM, which
then gets ``kv-network``. And a ConfigMap is read by more people than a Secret: every secret is taken out of
the configuration and becomes a variable of the pods that need it; one that has no variable is refused.
``cautions`` are what else a user should know before applying the manifests.
"""

from __future__ import annotations

import gzip
import hmac
import json
import math
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynaplan.config.overrides import Sections, merge_sections
from dynaplan.config.planner import in_namespace, settings_of, with_worker_sizes
from dynaplan.config.service_config import (
    COMMON,
    SERVICE_ARGS,
    kebab_keys,
    section_options,
    served_model_name,
)
from dynaplan.config.settings.fields import kebab
from dynaplan.config.settings.frontend import DECODE_COMPONENT, PREFILL_COMPONENT
from dynaplan.config.settings.planner import HISTORY_INTERVALS, KUBERNETES, PlannerSettings
from dynaplan.config.settings.servers import ETCD, NATS
from dynaplan.config.settings.worker import SIMULATED, ModelSettings, ProcessSettings, engine_of
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.engines import registry
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import ServiceSpec
from dynaplan.kubernetes.manifests import (
    NATS_TOKEN,
    TOKEN,
    ExportedDeployment,
    ExportedService,
    SharedServices,
    VolumeMount,
)
from dynaplan.kubernetes.sources import ExportSource
from dynaplan.planner.recorders.decision_log import read_recording
from dynaplan.planner.sla_model import build_sla_model
from dynaplan.store.instances import host_of, is_loopback
from dynaplan.util.errors import ConfigError
from dynaplan.util.masking import mask_secrets

STOCK = {Role.FRONTEND: "Frontend", Role.DECODE: DECODE_COMPONENT, Role.PREFILL: PREFILL_COMPONENT}
"""The services that can be started one by one, beside a planner of any name."""

OBJECT_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""A name that still is one of Kubernetes with ``-frontend`` behind it, for a Service too."""

PLANNER_PORT = 9085
"""The port of the planner's metrics and probes, ``containerPort`` of ``templates/planner.yaml``."""

API_KEY = "DYNAPLAN_API_KEY"
SECRET_OPTIONS = {"hf-token": "HF_TOKEN", "api-key": API_KEY}
"""Secret options -> the variable with the same meaning."""


@dataclass(frozen=True)
class ClusterOptions:
    """The options of ``dynaplan export kubernetes`` on how it runs in the cluster."""

    image: str
    name: str | None = None
    kubernetes_namespace: str = ""
    nats: str = ""
    etcd: str = ""
    store: str | None = None
    volume_claims: tuple[str, ...] = ()
    api_key: str = field(default="", repr=False)
    token_file: Path | None = None


def describe(source: ExportSource, options: ClusterOptions) -> ExportedDeployment:
    """Return the description that manifests are made of; raises ConfigError."""
    _check_stock(source)
    name = _object_name(options.name or source.spec.namespace)
    sections, variables = without_secrets(source.config)
    if options.api_key:
        variables.setdefault(STOCK[Role.FRONTEND], {})[API_KEY] = options.api_key
    settings = _planner_settings(source)
    files = planner_files(settings, source.log_dir) if settings else PlannerFiles()
    servers, token = _servers(source, options, name), _token(source, options)
    # NATS takes a variable that begins with a digit for a number.
    secrets = {TOKEN: token} | ({NATS_TOKEN: f"n{_derived(token)}"} if servers.is_own_nats else {})
    services = []
    for service in source.spec.services:
        if service.in_process_of:
            continue
        needed = _variables_of(service, source, variables)
        keys = {variable: f"{service.role.value}.{variable}" for variable in needed}
        secrets |= {keys[variable]: value for variable, value in needed.items()}
        if service.role is Role.PLANNER and settings:
            arguments = planner_flags(settings, files.options)
        else:
            arguments = [_model_flag(service, source)] if service.role in SCALED_ROLES else []
        services.append(_service(service, source, arguments, keys))
    engine = engine_of(section_options(source.config, STOCK[Role.DECODE]))
    return ExportedDeployment(
        graph_namespace=source.spec.namespace,
        name=name,
        image=options.image,
        services=tuple(services),
        config=_config(source, sections),
        servers=servers,
        secrets=secrets,
        planner_files=files.contents,
        volumes=tuple(map(_volume, options.volume_claims)),
        namespace=options.kubernetes_namespace,
        framework=engine if registry.engine_kind(engine).is_dynamo_backend else "",
    )


def _check_stock(source: ExportSource) -> None:
    for service in source.spec.services:
        is_stock = service.role is Role.PLANNER or STOCK.get(service.role) == service.name
        if not service.in_process_of and not is_stock:
            raise ConfigError(
                f"{service.name} is a service of your own, and only the stock ones are started one by one",
                hint=f"Expected a graph of {', '.join(STOCK.values())} and a planner; run {service.name} "
                "beside it as a program that joins (docs/guides/joining.md).",
            )


def _object_name(text: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not OBJECT_NAME.fullmatch(name):
        raise ConfigError(
            f"{text!r} cannot begin the names of Kubernetes' objects",
            hint="Expected, with --name, at most 40 letters, digits and dashes, beginning with a letter.",
        )
    return name


def _volume(text: str) -> VolumeMount:
    claim, _, path = text.partition(":")
    if not claim or not path.startswith("/"):
        raise ConfigError(f"--volume-claim {text}", hint="Expected CLAIM:/PATH, as models:/models.")
    return VolumeMount(claim, path)


def _servers(source: ExportSource, options: ClusterOptions, name: str) -> SharedServices:
    """Return the servers: named ones; a NATS of its own where it is the store, or has queue or events."""
    from dynaplan.fleet.servers import needs_nats

    _refuse_login(NATS, options.nats)
    _refuse_login(ETCD, options.etcd)
    store = options.store or (ETCD if options.etcd else NATS)
    if options.etcd and store != ETCD:
        raise ConfigError(
            f"--etcd {options.etcd} with --store {store}: there is one key-value store", hint="Leave one out."
        )
    is_needed = store == NATS or needs_nats(source.spec, source.config)
    is_own = is_needed and not options.nats
    url = f"nats://{name}-nats:4222" if is_own else options.nats
    return SharedServices(store, url, options.etcd, is_own)


def _refuse_login(server: str, url: str) -> None:
    shown = mask_secrets(url)
    if shown != url:
        prefix = f"{server.upper()}_AUTH"
        raise ConfigError(
            f"--{server} {shown}: the login would stand in the Deployments, not in the Secret",
            hint=f"Leave it out, and give {prefix}_USERNAME and {prefix}_PASSWORD in the {SERVICE_ARGS}.envs "
            "of each service, which go into the Secret.",
        )


def _token(source: ExportSource, options: ClusterOptions) -> str:
    from dynaplan.fleet.runtime_dir import new_token, read_token

    return read_token(options.token_file) if options.token_file else source.token or new_token()


def _derived(token: str) -> str:
    """Return NATS' token, the same whenever the workers' is: an export that is repeated changes nothing."""
    return hmac.new(token.encode(), NATS_TOKEN.encode(), "sha256").hexdigest()


def without_secrets(config: Mapping[str, Mapping[str, Any]]) -> tuple[Sections, dict[str, dict[str, str]]]:
    """Return the configuration without its secrets, and the secrets: section -> variable -> value.

    Secrets are ``hf-token``, ``api-key``, and everything in ``ServiceArgs.envs``. Raises ConfigError for any
    other option that holds a secret, naming it.
    """
    sections: Sections = {}
    variables: dict[str, dict[str, str]] = {}
    for name, section in config.items():
        public = {key: value for key, value in section.items() if kebab(key) not in SECRET_OPTIONS}
        arguments = public.get(SERVICE_ARGS)
        if isinstance(arguments, Mapping):
            public[SERVICE_ARGS] = {key: value for key, value in arguments.items() if key != "envs"}
        for key, value in public.items():
            if mask_secrets({key: value}) != {key: value}:
                raise ConfigError(
                    f"{name}.{key} holds a secret, and a ConfigMap is no place for it",
                    hint=f"Give it as a variable in {name}.{SERVICE_ARGS}.envs, which goes into the Secret.",
                )
        named = {SECRET_OPTIONS.get(kebab(key), ""): value for key, value in section.items() if value}
        named.pop("", None)
        envs = (section.get(SERVICE_ARGS) or {}).get("envs") or {}
        sections[name] = public
        variables[name] = {variable: str(value) for variable, value in {**named, **envs}.items()}
    return sections, variables


def _variables_of(
    service: ServiceSpec, source: ExportSource, variables: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return the secret variables of a service's process, and of those services that run in it."""
    inside = [other.name for other in source.spec.services if other.in_process_of == service.name]
    found: dict[str, str] = {}
    for name in (*inside, service.name):
        found |= {**variables.get(COMMON, {}), **variables.get(name, {})}
    return found


def _service(
    service: ServiceSpec, source: ExportSource, arguments: list[str], secrets: Mapping[str, str]
) -> ExportedService:
    options = section_options(source.config, service.name)
    given = kebab_keys(source.config.get(service.name, {})).get(SERVICE_ARGS) or {}
    resources = given.get("resources") or {}
    deadline_s = options.get("drain-deadline")
    drain_s = ProcessSettings.drain_deadline_s if deadline_s is None else float(deadline_s)
    return ExportedService(
        role=service.role,
        arguments=tuple(arguments),
        replicas=source.counts.get(service.role, service.workers),
        gpus=math.ceil(service.gpus),
        requests={key: str(resources[key]) for key in ("cpu", "memory") if resources.get(key)},
        drain_s=0.0 if service.role is Role.PLANNER else drain_s,
        secrets=secrets,
        has_engine=service.role in SCALED_ROLES and engine_of(options) != SIMULATED,
    )


def _model_flag(service: ServiceSpec, source: ExportSource) -> str:
    """Return the flag that names the model: the planner reads there whether both roles serve the same."""
    options = section_options(source.config, service.name)
    engine, model = engine_of(options), options.get("model") or ModelSettings.model
    if engine == SIMULATED:
        return f"--model={model}"
    _, usual = registry.model_location(engine, model, Path.cwd())
    name = options.get("served-model-name") or served_model_name(source.config) or usual or model
    return f"--served-model-name={name}"


def _planner_settings(source: ExportSource) -> PlannerSettings | None:
    planner = source.spec.of_role(Role.PLANNER)
    if planner is None:
        return None
    options = with_worker_sizes(section_options(source.config, planner.name), source.config)
    settings = settings_of(in_namespace(options, source.spec.namespace))
    if settings.startup_time_s is None:
        settings = replace(settings, startup_time_s=source.startup_s)
    return settings


def planner_flags(settings: PlannerSettings, files: Mapping[str, str]) -> list[str]:
    """Return the flags of a planner in a cluster: all that is not the default, and where its files are."""
    usual = PlannerSettings().to_options()
    options = {key: value for key, value in settings.to_options().items() if usual.get(key) != value}
    options.pop("log-dir", None)
    options |= {
        "namespace": settings.namespace,
        "environment": KUBERNETES,
        "metric-reporting-prometheus-port": PLANNER_PORT,
        "metric-reporting-prometheus-host": "0.0.0.0",
        **files,
    }
    return [f"--{key}={_text(value)}" for key, value in sorted(options.items())]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _config(source: ExportSource, sections: Sections) -> str:
    """Return the graph's YAML as pods read it: without the planner, with what is different in a cluster."""
    import yaml

    scaled = [service for service in source.spec.services if service.role in SCALED_ROLES]
    changed: Sections = {}
    for service in scaled:
        section: dict[str, Any] = {SERVICE_ARGS: {"resources": {"gpu": math.ceil(service.gpus)}}}
        kind = registry.engine_kind(engine_of(section_options(source.config, service.name)))
        if len(scaled) > 1 and kind.moves_kv_between_hosts:
            section["kv-network"] = True
        changed[service.name] = section
    planner = source.spec.of_role(Role.PLANNER)
    merged = merge_sections(sections, changed)
    kept = {name: section for name, section in merged.items() if not planner or name != planner.name}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)


def cautions(source: ExportSource, deployment: ExportedDeployment) -> list[str]:
    """Return a line for each thing that a user of the manifests should know before applying them."""
    found = [*_about_workers(source, deployment), *_about_requests(source, deployment)]
    return list(dict.fromkeys(found))


def _about_workers(source: ExportSource, deployment: ExportedDeployment) -> Iterator[str]:
    scaled = [service for service in source.spec.services if service.role in SCALED_ROLES]
    for service in scaled:
        options = section_options(source.config, service.name)
        engine, model = engine_of(options), str(options.get("model") or "")
        if service.gpus != int(service.gpus):
            yield (
                f"{service.name}: a pod gets a whole GPU in the place of {service.gpus:g}: "
                "Kubernetes shares none"
            )
        is_mounted = any(model.startswith(volume.path.rstrip("/") + "/") for volume in deployment.volumes)
        if engine != SIMULATED and Path(model).is_absolute() and not is_mounted:
            yield (
                f"{service.name}: the model {model} is a path: the image must have it there, or a volume: "
                "--volume-claim CLAIM:/PATH"
            )
        if len(scaled) > 1 and not registry.engine_kind(engine).moves_kv_between_hosts:
            yield (
                f"{service.name}: KV entries of {engine} do not move between pods: decode workers compute "
                "their prompts themselves. vLLM's move"
            )


def _about_requests(source: ExportSource, deployment: ExportedDeployment) -> Iterator[str]:
    frontend = deployment.of_role(Role.FRONTEND)
    if frontend and API_KEY not in frontend.secrets:
        yield f"no API key: whoever reaches the Service can use it; set {API_KEY} to ask for a key"
    planner = source.spec.of_role(Role.PLANNER)
    if planner is None:
        yield "the graph has no planner: the numbers of workers stay as they are"
        return
    options = section_options(source.config, planner.name)
    settings = settings_of(options)
    if settings.is_by_targets:
        try:
            build_sla_model(settings)
        except ConfigError as error:
            yield f"{planner.name}: unless its image has it, the planner ends at its start: {error.args[0]}"
    endpoint = options.get("prometheus-endpoint")
    if endpoint and is_loopback(host_of(str(endpoint))):
        yield f"{planner.name}.prometheus-endpoint is {endpoint}, which leads to the planner's own pod there"


PLANNER_DIRECTORY = "/etc/dynaplan/planner"
"""Where the planner's pod has the files: ``mountPath`` of ``templates/planner.yaml``."""

PROFILE_SUFFIXES = (".npz", ".json")
"""Files of a profile that are read; plots and reports beside them are not."""

MEMORY = ("state", "next_state")
"""The fields of a decision's record that forecasts do not use: the planner's memory, most of a record."""

MAX_HISTORY_BYTES = 400 * 1024
"""The part of a ConfigMap of 1 MiB that the history may take, before it is written in base64."""


@dataclass
class PlannerFiles:
    """Files by their paths below the planner's directory, and the options that name them there."""

    contents: dict[str, bytes] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)

    def add_history(self, name: str, content: bytes) -> None:
        self.contents[f"history/{name}"] = content
        self.options["load-predictor-warmup-trace"] = f"{PLANNER_DIRECTORY}/history/{name}"


def planner_files(settings: PlannerSettings, log_dir: Path | None) -> PlannerFiles:
    """Read the files that go into the planner's image; ``log_dir`` has the decisions of earlier planners.

    Nothing is needed by a planner without targets. A profile that is shipped is in the image, too.
    """
    files = PlannerFiles()
    if not settings.is_by_targets:
        return files
    _add_profile(files, Path(os.path.expanduser(settings.profile_results_dir)))
    trace = settings.load_predictor_warmup_trace
    if trace and Path(os.path.expanduser(trace)).is_file():
        files.add_history("trace.gz", gzip.compress(_read(Path(os.path.expanduser(trace))), mtime=0))
    elif not trace and log_dir and (records := _decisions(log_dir)):
        files.add_history("decisions.jsonl.gz", pack_history(records))
    return files


def pack_history(records: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the newest decisions, without the planner's state, as at most MAX_HISTORY_BYTES of gzipped JSON
    lines."""
    traffic = ({name: record[name] for name in record if name not in MEMORY} for record in records)
    lines = deque((json.dumps(each, separators=(",", ":")) for each in traffic), maxlen=HISTORY_INTERVALS)
    while len(packed := gzip.compress("\n".join(lines).encode(), mtime=0)) > MAX_HISTORY_BYTES:
        for _ in range(len(lines) // 2):
            lines.popleft()
    return packed


def _decisions(log_dir: Path) -> list[Mapping[str, Any]]:
    """Return the newest planner's decisions with measured traffic; none where it has not decided yet."""
    try:
        records = [record for _, record in read_recording(log_dir)]
    except ConfigError:
        return []
    return [record for record in records if (record.get("observation") or {}).get("traffic")]


def _add_profile(files: PlannerFiles, path: Path) -> None:
    """Add a profile of the user's: a file, or a directory with everything in it that is read."""
    below = [path] if path.is_file() else sorted(path.rglob("*"))
    found = [file for file in below if file.is_file() and (file == path or file.suffix in PROFILE_SUFFIXES)]
    root = path.parent if path.is_file() else path
    files.contents |= {f"profile/{file.relative_to(root).as_posix()}": _read(file) for file in found}
    if found:
        last = f"/{path.name}" if path.is_file() else ""
        files.options["profile-results-dir"] = f"{PLANNER_DIRECTORY}/profile{last}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="Expected a file.") from error
