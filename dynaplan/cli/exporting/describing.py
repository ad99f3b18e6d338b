"""The description that manifests are made of: each service's command, pods, environment and secrets."""

from __future__ import annotations

import hmac
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynaplan import wiring
from dynaplan.cli.exporting.cautions import cautions
from dynaplan.cli.exporting.planner_files import PlannerFiles, planner_files
from dynaplan.cli.exporting.secret_options import PublicConfig, without_secrets
from dynaplan.cli.exporting.sources import ExportSource
from dynaplan.cli.starting.checking import frontend_name
from dynaplan.core.manifests.exported import (
    NATS_TOKEN,
    TOKEN,
    ExportedDeployment,
    ExportedService,
    SharedServices,
    VolumeMount,
)
from dynaplan.core.manifests.nats_server import COMPONENT as NATS_COMPONENT
from dynaplan.core.manifests.nats_server import PORT as NATS_PORT
from dynaplan.core.manifests.pods import CONFIG_DIRECTORY, CONFIG_FILE, PORTS
from dynaplan.domain.errors import ConfigError
from dynaplan.domain.graph import ServiceSpec
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.settings.planner import KUBERNETES, PlannerSettings
from dynaplan.domain.settings.routing import DECODE_COMPONENT, PREFILL_COMPONENT
from dynaplan.domain.settings.servers import ETCD, NATS
from dynaplan.domain.settings.worker import SIMULATED, ModelSettings, ProcessSettings, engine_of
from dynaplan.options.overrides import Sections, merge_sections
from dynaplan.options.planner import in_namespace, settings_of, with_deployed
from dynaplan.options.service_config import SERVICE_ARGS, kebab_keys, section_options

OPERATORS_ENGINES = ("vllm", "sglang", "trtllm")
"""The engines that Dynamo's operator has a word for."""

STOCK = {Role.FRONTEND: "Frontend", Role.DECODE: DECODE_COMPONENT, Role.PREFILL: PREFILL_COMPONENT}
"""The services that can be started one by one, beside a planner of any name."""

OBJECT_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""A name that still is one of Kubernetes with ``-frontend`` behind it, for a Service too."""


@dataclass(frozen=True)
class Wishes:
    """The options of ``dynaplan export kubernetes`` that say how it is to run in the cluster."""

    image: str
    name: str | None = None
    kubernetes_namespace: str = ""
    nats: str = ""
    etcd: str = ""
    store: str = ""
    volume_claims: tuple[str, ...] = ()
    api_key: str = field(default="", repr=False)
    token_file: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """A source with its secrets taken out and its planner's settings read, before it is described."""

    source: ExportSource
    public: PublicConfig
    settings: PlannerSettings | None
    files: PlannerFiles

    def secrets_of(self, service: ServiceSpec) -> dict[str, str]:
        """Return the secret variables of a service's process, and of those services that run in it."""
        inside = [each.name for each in self.source.spec.services if each.in_process_of == service.name]
        return {name: value for one in (*inside, service.name) for name, value in self.public.of(one).items()}


def described(source: ExportSource, wishes: Wishes) -> tuple[ExportedDeployment, list[str]]:
    """Return the description that manifests are made of, and warnings; raises ConfigError."""
    _check_stock(source)
    name = _object_name(wishes.name or source.spec.namespace)
    prepared = _prepared(source, wishes)
    servers, token = _servers(source, wishes, name), _token(source, wishes)
    services = [each for each in source.spec.services if not each.in_process_of]
    deployment = ExportedDeployment(
        graph_namespace=source.spec.namespace,
        name=name,
        image=wishes.image,
        services=tuple(_service(each, prepared) for each in services),
        config=_config(prepared),
        servers=servers,
        secrets={
            TOKEN: token,
            # NATS takes a variable that begins with a digit for a number.
            **({NATS_TOKEN: f"n{_derived(token, NATS_TOKEN)}"} if servers.is_own_nats else {}),
            **{
                _key(each, name): value
                for each in services
                for name, value in prepared.secrets_of(each).items()
            },
        },
        planner_files=prepared.files.contents,
        volumes=tuple(map(_volume, wishes.volume_claims)),
        namespace=wishes.kubernetes_namespace,
        framework=_framework(source),
    )
    return deployment, cautions(source, deployment)


def _prepared(source: ExportSource, wishes: Wishes) -> Prepared:
    public = without_secrets(source.config)
    if wishes.api_key:
        public.variables.setdefault(STOCK[Role.FRONTEND], {})["DYNAPLAN_API_KEY"] = wishes.api_key
    planner = source.spec.of_role(Role.PLANNER)
    if planner is None:
        return Prepared(source, public, None, PlannerFiles())
    options = with_deployed(section_options(source.config, planner.name), source.config)
    settings = settings_of(in_namespace(options, source.spec.namespace))
    if settings.startup_time_s is None:
        settings = replace(settings, startup_time_s=source.startup_s)
    return Prepared(source, public, settings, planner_files(settings, source.log_dir))


def _service(service: ServiceSpec, prepared: Prepared) -> ExportedService:
    options = section_options(prepared.source.config, service.name)
    resources = (kebab_keys(prepared.source.config.get(service.name, {})).get(SERVICE_ARGS) or {}).get(
        "resources"
    )
    asked = {
        key: str(value) for key, value in (resources or {}).items() if key in ("cpu", "memory") and value
    }
    is_planner = service.role is Role.PLANNER
    drain_s = 0.0 if is_planner else _drain_s(options)
    return ExportedService(
        role=service.role,
        arguments=_arguments(service, prepared),
        replicas=prepared.source.counts.get(service.role, service.workers),
        gpus=math.ceil(service.gpus),
        requests=asked,
        drain_s=drain_s,
        secrets={name: _key(service, name) for name in prepared.secrets_of(service)},
        has_engine=service.role in (Role.DECODE, Role.PREFILL) and engine_of(options) != SIMULATED,
    )


def _drain_s(options: Mapping[str, Any]) -> float:
    given = options.get("drain-deadline")
    return ProcessSettings.drain_deadline_s if given is None else float(given)


def _arguments(service: ServiceSpec, prepared: Prepared) -> tuple[str, ...]:
    """Return the arguments of the component's own command."""
    namespace = f"--namespace={prepared.source.spec.namespace}"
    file = ("-f", f"{CONFIG_DIRECTORY}/{CONFIG_FILE}")
    if service.role is Role.FRONTEND:
        return ("frontend", namespace, "--host=0.0.0.0", f"--port={PORTS[Role.FRONTEND]}", *file)
    if service.role is Role.PLANNER and prepared.settings:
        return ("planner", *planner_flags(prepared.settings, prepared.files.options))
    return ("worker", namespace, f"--role={service.role.value}", *file, _model(service, prepared.source))


def _model(service: ServiceSpec, source: ExportSource) -> str:
    """Return the flag that names the model: the planner reads there whether both roles serve the same."""
    options = section_options(source.config, service.name)
    engine, model = engine_of(options), options.get("model") or ModelSettings.model
    if engine == SIMULATED:
        return f"--model={model}"
    _, usual = wiring.engines.model_location(engine, model, Path.cwd())
    name = options.get("served-model-name") or frontend_name(source.config) or usual or model
    return f"--served-model-name={name}"


def planner_flags(settings: PlannerSettings, files: Mapping[str, str]) -> list[str]:
    """Return the flags of a planner in a cluster: all that is not the default, and where its files are."""
    usual = PlannerSettings().to_options()
    options = {key: value for key, value in settings.to_options().items() if usual.get(key) != value}
    in_cluster = {
        "namespace": settings.namespace,
        "environment": KUBERNETES,
        "metric-reporting-prometheus-port": PORTS[Role.PLANNER],
        "metric-reporting-prometheus-host": "0.0.0.0",
        **files,
    }
    options.pop("log-dir", None)
    return [f"--{key}={_text(value)}" for key, value in sorted({**options, **in_cluster}.items())]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _config(prepared: Prepared) -> str:
    """Return the graph's YAML as pods read it: without secrets, and with what is different in a cluster."""
    import yaml

    source = prepared.source
    scaled = [each for each in source.spec.services if each.role in (Role.DECODE, Role.PREFILL)]
    changed: Sections = {}
    for each in scaled:
        section: dict[str, Any] = {SERVICE_ARGS: {"resources": {"gpu": math.ceil(each.gpus)}}}
        if len(scaled) > 1 and engine_of(section_options(source.config, each.name)) == "vllm":
            section["kv-network"] = True
        changed[each.name] = section
    sections = merge_sections(prepared.public.sections, changed)
    planner = source.spec.of_role(Role.PLANNER)
    kept = {name: section for name, section in sections.items() if planner is None or name != planner.name}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)


def _check_stock(source: ExportSource) -> None:
    for each in source.spec.services:
        if not each.in_process_of and each.role is not Role.PLANNER and STOCK.get(each.role) != each.name:
            raise ConfigError(
                f"{each.name} is a service of your own, and only the stock ones are started one by one",
                hint=f"Expected a graph of {', '.join(STOCK.values())} and a planner; run {each.name} beside "
                "it as a program that joins (docs/guides/joining.md).",
            )


def _object_name(text: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not OBJECT_NAME.fullmatch(name):
        raise ConfigError(
            f"{text!r} cannot begin the names of Kubernetes' objects",
            hint="Expected, with --name, at most 40 letters, digits and dashes, beginning with a letter.",
        )
    return name


def _servers(source: ExportSource, wishes: Wishes, name: str) -> SharedServices:
    """Return the servers: named ones; a NATS of its own where it is the store or has the queue."""
    from dynaplan.supervisor.servers.needed import has_prefill_queue

    store = wishes.store or (ETCD if wishes.etcd else NATS)
    if wishes.etcd and store != ETCD:
        raise ConfigError(
            f"--etcd {wishes.etcd} with --store {store}: there is one key-value store", hint="Leave one out."
        )
    is_needed = store == NATS or has_prefill_queue(source.spec, source.config)
    is_own = is_needed and not wishes.nats
    url = f"nats://{name}-{NATS_COMPONENT}:{NATS_PORT}" if is_own else wishes.nats
    return SharedServices(store, url, wishes.etcd, is_own)


def _token(source: ExportSource, wishes: Wishes) -> str:
    from dynaplan.supervisor.runtime_dir import new_token, read_token

    return read_token(wishes.token_file) if wishes.token_file else source.token or new_token()


def _derived(token: str, purpose: str) -> str:
    """Return another token, the same whenever this one is: an export that is repeated changes nothing."""
    return hmac.new(token.encode(), purpose.encode(), "sha256").hexdigest()


def _key(service: ServiceSpec, variable: str) -> str:
    """Return the key of the Secret for a variable of a service."""
    return f"{service.role.value}.{variable}"


def _volume(text: str) -> VolumeMount:
    claim, _, path = text.partition(":")
    if not claim or not path.startswith("/"):
        raise ConfigError(f"--volume-claim {text}", hint="Expected CLAIM:/PATH, as models:/models.")
    return VolumeMount(claim, path)


def _framework(source: ExportSource) -> str:
    engine = engine_of(section_options(source.config, STOCK[Role.DECODE]))
    return engine if engine in OPERATORS_ENGINES else ""
