"""``dynaplan reload``: read the configuration again, show the difference, apply it while requests flow.

Live keys change at once; for other settings workers are replaced one after another. When a new worker fails,
every worker gets the previous settings again.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.options import config_file_option, namespace_argument, step_timeout_option
from dynaplan.cli.reload_models import check_prefill_queue, model_changes, put_away
from dynaplan.cli.restart import replace_worker, replace_workers, request_replacement
from dynaplan.cli.running_deployment import connect
from dynaplan.cli.scale_counts import expected_times
from dynaplan.cli.serve import warn
from dynaplan.cli.service_options import ServiceOptionsCommand
from dynaplan.cli.timing import GPU_FREE_TIMEOUT_S, WORKERS_POLL_S
from dynaplan.config.frontend import DEADLINE_OPTIONS, NAMES, configured_deadline
from dynaplan.config.overrides import merge_sections, parse_overrides
from dynaplan.config.planner import engine_sizes, written_name
from dynaplan.config.service_config import COMMON, SERVICE_ARGS, kebab_keys, section_options
from dynaplan.config.settings.fields import options_of
from dynaplan.config.settings.frontend import DisaggregationSettings, RoutingSettings
from dynaplan.config.settings.worker import engine_of
from dynaplan.config.stock import matching_options
from dynaplan.contract.option_changes import RELOAD_INTERRUPTED, OptionChange
from dynaplan.contract.store_keys import LIVE_SETTINGS, SCALED_ROLES, live_settings_prefix
from dynaplan.fleet.launch import (
    RELOADED_FILE,
    AdjustedOption,
    Reload,
    last_reload,
    read_launch,
    reapply_adjusted,
)
from dynaplan.fleet.rules.reloading import (
    WORKERS,
    ApplyMode,
    ReloadRules,
    SettingChange,
    restarted,
    setting_changes,
)
from dynaplan.fleet.runtime_dir import write_private
from dynaplan.graph.lifecycle import COUNTS, Role, Worker, WorkerState
from dynaplan.process.kernel import die_with_parent
from dynaplan.process.signals import run_interruptible
from dynaplan.store.model import Transaction
from dynaplan.util.errors import ConfigError, DeploymentError, DynaplanError, PermanentError, TemporaryError
from dynaplan.util.masking import mask_secrets
from dynaplan.util.tables import text_table

if TYPE_CHECKING:
    from dynaplan.config.frontend import PrefillDeadline
    from dynaplan.config.overrides import Sections
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.launch import Launch
    from dynaplan.graph.model import GraphSpec, ServiceSpec
    from dynaplan.store.port import KeyValueStore

LIVE_KEYS = {name.replace("_", "-"): name for name in LIVE_SETTINGS}
"""The options that change while requests flow, with the names of their keys in the store."""

UNLIMITED_QUEUE = 1_000_000
"""Written for ``max-prefill-queue-size`` when the queue is unlimited: the key is a whole number."""

PLANNER = "Planner"

LOCK_FILE = "reload.lock"
"""The file in the runtime directory that a running reload or upgrade keeps locked."""

MAX_VALUE_CHARS = 40
"""Characters of a value in the table of changes."""


@click.command(
    cls=ServiceOptionsCommand,
    name="reload",
    epilog="Any option of a service: --Service.key=value. Later reloads keep it.",
)
@namespace_argument
@config_file_option("Another YAML; default: the one that `serve` was started with.")
@click.option("--dry-run", is_flag=True, help="Show the difference, and change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Apply it without asking.")
@click.option("--by-planner", metavar="CHANGE", hidden=True, help="Set one option as the planner asks for.")
@step_timeout_option
@click.pass_context
def command(
    ctx: click.Context,
    namespace: str | None,
    config_file: str | None,
    dry_run: bool,
    yes: bool,
    by_planner: str | None,
    timeout: float | None,
) -> None:
    """Read the YAML again, show what has changed, and apply it without dropping a request.

    Live settings change at once; for the others workers are replaced, a new one ready before the old one is
    drained, one after another. When a new worker fails the previous settings are restored everywhere.
    """
    deployment = connect(namespace)
    if by_planner:
        die_with_parent(os.getppid())
        with reload_lock(deployment, waits=True):
            pass  # Another reload says nothing against the change: it is made after that one.
    launch, before_interrupted = _read_launch(deployment)
    if by_planner:
        _reload_option(deployment, launch, before_interrupted, OptionChange.from_text(by_planner))
        return
    new = _load_new_settings(launch, config_file, ctx.obj)
    before = launch.config if before_interrupted is None else before_interrupted
    if launch.graph.on_demand:
        _reload_models(deployment, launch, replace(new, before=before), timeout, is_dry=dry_run, yes=yes)
        return
    changes = _changes(launch, before, new)
    if before_interrupted is not None:
        click.echo("The last reload was interrupted; compared with the settings before it:")
    if not changes:
        click.echo(f"nothing has changed in {new.config_file or 'the settings'}")
        return
    click.echo(difference(changes))
    _refuse_settings_of_serve(changes)
    if dry_run:
        return
    _confirm(yes, launch)

    reloading = ReloadRun(deployment, launch.graph, replace(new, before=before), timeout)
    run_interruptible(reloading.run(live_keys(changes, new.config), restarted(changes, launch.graph)))


def difference(changes: Sequence[SettingChange]) -> str:
    """Return the table of the changed settings: old and new value, and how the change is applied."""
    rows = [("SETTING", "OLD", "NEW", "APPLIED BY")]
    rows += [
        (
            f"{each.service}.{each.key}",
            _format_value(each, each.before),
            _format_value(each, each.after),
            each.apply_text,
        )
        for each in changes
    ]
    return text_table(rows)


def live_keys(changes: Sequence[SettingChange], config: Sections) -> dict[str, str]:
    """Return the values of the live settings that change, by the names of their keys in the store.

    A setting that ``config`` has no longer gets its default.
    """

    defaults: dict[str, Any] = {key: each.default for key, each in options_of(DisaggregationSettings).items()}
    default_settings = DisaggregationSettings(prefill_deadline_ms=_deadline(config).ms)
    defaults["max-prefill-queue-size"] = int(min(default_settings.max_queued, UNLIMITED_QUEUE))
    defaults["max-local-prefill-length"] = default_settings.max_local_tokens
    live = [each for each in changes if each.apply_mode is ApplyMode.LIVE]
    values = {each.key: defaults[each.key] if each.is_removed else each.after for each in live}
    return {LIVE_KEYS[key]: str(value) for key, value in values.items()}


def _read_launch(deployment: RunningDeployment) -> tuple[Launch, Sections | None]:
    """Return the deployment's launch, and the settings before a reload that did not finish, else None.

    Raises DeploymentError when the launch cannot be read.
    """
    try:
        launch = read_launch(deployment.runtime_dir)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DeploymentError(
            f"cannot read how {deployment.namespace} was started: {error}",
            hint="Run this as the user who started `dynaplan serve`, with the same release.",
        ) from error
    last = last_reload(deployment.runtime_dir)
    return launch, last.before if last else None


def _load_new_settings(launch: Launch, config_file: str | None, overrides: Sequence[str]) -> Reload:
    """Return the settings that ``serve`` would read now; ConfigError names the key that is wrong.

    Changes to the directory that ``serve`` was started in, and prints the warnings that ``serve`` would.
    """
    from dynaplan.cli.loading import find_config, load_deployment
    from dynaplan.graph.config import DEPLOYMENT_CONFIG_VARIABLE

    here, directory = Path.cwd(), Path(launch.graph.working_dir)
    os.environ.pop(DEPLOYMENT_CONFIG_VARIABLE, None)
    given_path = str(here / config_file) if config_file and (here / config_file).is_file() else config_file
    config_path = given_path or launch.config_file or None
    if config_path is None and not overrides:
        raise ConfigError(
            "this deployment was started without a configuration file",
            hint="Pass one: `dynaplan reload -f FILE`, or settings: `dynaplan reload --Service.key=value`.",
        )
    os.chdir(directory)
    all_overrides = (*launch.overrides, *overrides)
    graph, config, spec, warnings = load_deployment(
        launch.graph.identifier,
        config_path,
        directory,
        launch.namespace,
        all_overrides,
        lambda: len(launch.gpus),
    )
    warn(warnings)
    file = find_config(config_path, directory, graph)
    if spec.on_demand or launch.graph.on_demand:
        return Reload(config, str(file or ""), all_overrides, graph=spec)
    _check_no_service_removed(launch.graph, spec)
    config, adjusted = reapply_adjusted(config, launch.adjusted, parse_overrides(overrides))
    return Reload(config, str(file or ""), all_overrides, adjusted=adjusted)


def _reload_option(
    deployment: RunningDeployment, launch: Launch, before_interrupted: Sections | None, change: OptionChange
) -> None:
    """Set the option that the planner asks for, and nothing else: the configuration's file is not read.

    Goes on with such a reload that was interrupted. Raises DeploymentError where a person has changed the
    option, or has begun a reload that is not finished.
    """
    if not any(each.name == change.component and each.role in SCALED_ROLES for each in launch.graph.services):
        raise DeploymentError(f"{change.component} has no engine, or is no service of {launch.namespace}")
    own = launch.settings_of(change.component)
    now = engine_sizes(own).get(change.option)
    if now is None:
        raise DeploymentError(f"{change.component} has no {change.option} that is known")
    option = written_name(own, change.option)
    goes_on = before_interrupted is not None and now == change.after and launch.adjusted
    if before_interrupted is not None and not goes_on:
        raise DeploymentError(RELOAD_INTERRUPTED, hint="Run `dynaplan reload` to finish it.")
    if now == change.after and not goes_on:
        click.echo(f"{change.component}.{option} is {now}")
        return
    if not goes_on and now != change.before:
        raise DeploymentError(f"{change.component}.{option} is {now}, not {change.before} any more")
    others = [each for each in launch.adjusted if (each.component, each.option) != (change.component, option)]
    known = next((each for each in launch.adjusted if each not in others), None)
    given = known.user_value if known else own.get(option)
    if given != change.after:
        others.append(AdjustedOption(change.component, option, given, change.after))
    before = launch.config if before_interrupted is None else before_interrupted
    config = merge_sections(launch.config, {change.component: {option: change.after}})
    new = Reload(config, launch.config_file, launch.overrides, before=before, adjusted=tuple(others))
    os.chdir(launch.graph.working_dir)
    changes = _changes(launch, before, new)
    _refuse_settings_of_serve(changes)
    reloading = ReloadRun(deployment, launch.graph, new, None)
    run_interruptible(reloading.run({}, restarted(changes, launch.graph)))


def _reload_models(
    deployment: RunningDeployment,
    launch: Launch,
    new: Reload,
    timeout: float | None,
    *,
    is_dry: bool,
    yes: bool,
) -> None:
    """Show which models are added, changed and removed, and apply that; see ``reload_models``."""
    assert new.before is not None
    check_prefill_queue(new.graph or launch.graph, os.environ)
    changes = model_changes(new.before, new.config)
    if not changes:
        click.echo(f"nothing has changed in {new.config_file or 'the settings'}")
        return
    click.echo("\n".join(changes.lines))
    if is_dry:
        return
    _confirm(yes, launch)
    roles = {Role.FRONTEND, Role.PLANNER} if changes.planners else {Role.FRONTEND}
    kept = [each.name for each in (new.graph or launch.graph).services]
    services = [each for each in launch.graph.services if each.role in roles and each.name in kept]
    reloading = ReloadRun(deployment, launch.graph, new, timeout)
    run_interruptible(
        reloading.run({}, services, lambda store: put_away(store, deployment.namespace, changes.changed))
    )


def _check_no_service_removed(old: GraphSpec, new: GraphSpec) -> None:
    missing = {service.name for service in old.services} - {service.name for service in new.services}
    if missing:
        raise ConfigError(
            f"{old.identifier} has no {', '.join(sorted(missing))} any more",
            hint="Other services need a restart: `dynaplan stop`, then `dynaplan serve` again.",
        )


def _changes(launch: Launch, before: Sections, new: Reload) -> tuple[SettingChange, ...]:
    from dynaplan.graph.config import resolve_graph
    from dynaplan.graph.loading import load_graph

    graph = launch.graph
    decode = graph.of_role(Role.DECODE)
    engine = engine_of(section_options(before, decode.name)) if decode else ""
    resolved = resolve_graph(
        load_graph(graph.identifier, Path(graph.working_dir)), new.config, launch.namespace
    )
    rules = ReloadRules(
        live_keys=LIVE_KEYS.keys(),
        frontend_keys=options_of(DisaggregationSettings).keys(),
        frontend_and_decode_keys=options_of(RoutingSettings).keys(),
        must_match_keys={*matching_options(engine), "engine", "model"} if engine else (),
        gpus={service.name: service.gpus for service in resolved.services},
        frontend_and_planner_keys=DEADLINE_OPTIONS if _deadline(before) != _deadline(new.config) else (),
        plans_for_targets=section_options(new.config, PLANNER).get("policy", "load") != "load",
    )
    return setting_changes(
        graph, effective_sections(graph, before), effective_sections(graph, new.config), rules
    )


def _deadline(config: Sections) -> PrefillDeadline:
    return configured_deadline(config, section_options(config, PLANNER))


def effective_sections(
    graph: GraphSpec, config: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return each service's settings as its processes read them, with dotted keys: ``ServiceArgs.workers``.

    Null values are left out. The frontends read the name of the model from ``Common``, too.
    """
    common = kebab_keys(config.get(COMMON) or {})
    sections: dict[str, dict[str, Any]] = {}
    for service in graph.services:
        names = {key: common[key] for key in NAMES if key in common and service.role is Role.FRONTEND}
        arguments = _flatten_mapping(SERVICE_ARGS, (config.get(service.name) or {}).get(SERVICE_ARGS) or {})
        own = section_options(config, service.name)
        sections[service.name] = {**names, **own, **arguments}
    return {
        name: {key: value for key, value in section.items() if value is not None or key == WORKERS}
        for name, section in sections.items()
    }


def _flatten_mapping(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flatten_mapping(f"{path}.{key}", inner)
    return flat


def _format_value(change: SettingChange, value: Any) -> str:
    text = str(mask_secrets({change.key: value})[change.key])
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"


def _refuse_settings_of_serve(changes: Sequence[SettingChange]) -> None:
    """Raise ConfigError if any changed setting needs a restart of ``serve``: then none is applied."""
    refused = [f"{each.service}.{each.key}" for each in changes if each.apply_mode is ApplyMode.RESTART_SERVE]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)}: changing {'that' if len(refused) == 1 else 'these'} needs a restart of "
            "`dynaplan serve`; nothing was applied",
            hint="Put the old value back, or `dynaplan stop` and serve again.",
        )


def _confirm(yes: bool, shown: Launch) -> None:
    """Ask; raises DeploymentError where another reload has changed the launch meanwhile."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("reload asks for confirmation, and stdin is no terminal", hint="Add -y.")
    click.confirm("Apply it?", default=True, abort=True)
    if read_launch(shown.runtime_dir) != shown:
        raise DeploymentError(
            "the settings have changed since they were shown; nothing was applied",
            hint="Run `dynaplan reload` again.",
        )


async def _noop(store: KeyValueStore) -> None:
    pass


class ReloadRun:
    """One reload of a deployment to the settings ``new``; when it fails, those of before are restored."""

    def __init__(
        self, deployment: RunningDeployment, graph: GraphSpec, new: Reload, timeout_s: float | None
    ) -> None:
        self._deployment = deployment
        self._graph = graph
        self._new_settings = new
        self._timeout_s = timeout_s
        launch = read_launch(deployment.runtime_dir)
        old = last_reload(deployment.runtime_dir)
        assert new.before is not None
        self._old_settings = replace(
            old or new,
            config=new.before,
            config_file=launch.config_file,
            overrides=launch.overrides,
            adjusted=launch.adjusted,
            before=None,
        )
        self._not_replaced: set[tuple[str, int]] = set()

    async def run(
        self,
        live: Mapping[str, str],
        services: Sequence[ServiceSpec],
        after_written: Callable[[KeyValueStore], Awaitable[None]] = _noop,
    ) -> None:
        """Apply the new settings; raises PermanentError when a new worker fails, after rolling back.

        ``after_written`` is called once the settings file is written: new workers start with it.
        """
        from dynaplan.store import connections

        with reload_lock(self._deployment):
            async with connections.open_store() as store:
                await self._run(store, live, services, after_written)

    async def _run(
        self,
        store: KeyValueStore,
        live: Mapping[str, str],
        services: Sequence[ServiceSpec],
        after_written: Callable[[KeyValueStore], Awaitable[None]],
    ) -> None:
        begun_s = time.monotonic()
        self._not_replaced = {each.process for each in self._workers()}
        before = await self._read_live_settings(store, live)
        self._write_settings_file(self._new_settings)
        try:
            await self._write_live_settings(store, live)
            await after_written(store)
            for service in services:
                await self._replace_workers(store, service)
        except asyncio.CancelledError:
            self._write_settings_file(self._old_settings)
            await self._write_live_settings(store, before)
            click.echo(
                "Interrupted: workers that start from now on get the previous settings. "
                "Workers that were replaced already keep the new ones until `dynaplan restart`.",
                err=True,
            )
            raise
        except DynaplanError as error:
            await self._roll_back(store, before, services, error)
        self._write_settings_file(replace(self._new_settings, before=None))
        click.echo(f"reloaded after {time.monotonic() - begun_s:.1f} s")

    async def _replace_workers(self, store: KeyValueStore, service: ServiceSpec) -> None:
        """Replace the workers of a service that still have the previous settings."""
        own = [each for each in self._workers_of(service) if each.state in COUNTS]
        workers = [each for each in own if each.process in self._not_replaced]
        # One that has crashed or was drained meanwhile is left out: its replacement has the new settings.
        still_there = (each for each in workers if each.process in {now.process for now in self._workers()})
        await replace_workers(store, self._deployment, still_there, self._timeout_s, len(workers))

    async def _roll_back(
        self,
        store: KeyValueStore,
        live: Mapping[str, str],
        services: Sequence[ServiceSpec],
        error: DynaplanError,
    ) -> None:
        """Restore the previous settings in every worker, and raise PermanentError with the cause."""
        click.echo(f"{error.args[0]}\nRestoring the previous settings.", err=True)
        self._write_settings_file(self._old_settings)
        replaced = {each.process for each in self._workers()} - self._not_replaced
        try:
            await self._write_live_settings(store, live)
            for service in reversed(services):
                for worker in self._workers_of(service):
                    if worker.process not in replaced:
                        continue
                    if worker.state is WorkerState.READY and service.role in SCALED_ROLES:
                        await replace_worker(
                            store, self._deployment, worker, self._timeout_s, GPU_FREE_TIMEOUT_S
                        )
                    elif worker.state is not WorkerState.BACKOFF:
                        await request_replacement(self._deployment, worker)
            await self._all_ready(services)
        except DynaplanError as second:
            raise PermanentError(
                f"{error.args[0]}; and the rollback failed: {second.args[0]}",
                hint="New workers get the previous settings. `dynaplan status` shows what runs.",
            ) from error
        raise PermanentError(
            f"the new settings do not work: {error.args[0]}",
            hint="Every worker has the previous settings. `dynaplan logs NAME` shows why one failed.",
        ) from error

    async def _all_ready(self, services: Sequence[ServiceSpec]) -> None:
        """Wait until every worker of these services is ready; TemporaryError after a deadline."""
        longest_s = self._timeout_s or expected_times(
            self._deployment, {service.role: 1 for service in services}
        ).limit_s(starts=True, leaves=True)
        deadline_s = time.monotonic() + longest_s
        while True:
            states = {each.name: each.state for service in services for each in self._workers_of(service)}
            others = [name for name, state in states.items() if state is not WorkerState.READY]
            if not others:
                return
            if time.monotonic() > deadline_s:
                raise TemporaryError(f"{', '.join(others)} not ready within {longest_s:g} s")
            await asyncio.sleep(WORKERS_POLL_S)

    def _write_settings_file(self, settings: Reload) -> None:
        """Replace the settings file atomically."""
        write_private(self._deployment.runtime_dir / RELOADED_FILE, settings.to_json())

    async def _read_live_settings(self, store: KeyValueStore, names: Mapping[str, str]) -> dict[str, str]:
        """Return the present values of these live keys; "" for a missing one."""
        prefix = live_settings_prefix(self._deployment.namespace)
        now = {item.key.removeprefix(prefix): item.value for item in await store.list(prefix)}
        return {name: now.get(name, "") for name in names}

    async def _write_live_settings(self, store: KeyValueStore, values: Mapping[str, str]) -> None:
        """Write these live keys; delete those with an empty value."""
        prefix = live_settings_prefix(self._deployment.namespace)
        puts = {prefix + name: value for name, value in values.items() if value}
        deletes = tuple(prefix + name for name, value in values.items() if not value)
        if values:
            await store.commit(Transaction(puts=puts, deletes=deletes))
        for name, value in values.items():
            click.echo(f"{name}: {value or 'reset to the configured value'}, live")

    def _workers(self) -> tuple[Worker, ...]:
        from dynaplan.fleet.deployments import find_deployment

        return find_deployment(self._deployment.namespace).workers

    def _workers_of(self, service: ServiceSpec) -> list[Worker]:
        return [each for each in self._workers() if each.component == service.name]


@contextmanager
def reload_lock(deployment: RunningDeployment, *, waits: bool = False) -> Iterator[None]:
    """Lock the deployment against other reloads and upgrades; raises DeploymentError while one runs.

    Where it ``waits`` it raises nothing, and has the lock once no other one runs.
    """
    descriptor = os.open(deployment.runtime_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            raise DeploymentError(
                f"another reload or upgrade of {deployment.namespace} is in progress",
                hint="Wait until it has finished.",
            ) from None
        yield
    finally:
        os.close(descriptor)
