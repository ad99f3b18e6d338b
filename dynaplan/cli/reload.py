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

from dynaplan.cli.deployment import connect
from dynaplan.cli.options import config_file_option, namespace_argument, step_timeout_option
from dynaplan.cli.restart import (
    replace_worker,
    request_replacement,
)
from dynaplan.cli.scale_counts import expected_times
from dynaplan.cli.service_options import ServiceOptionsCommand
from dynaplan.cli.timing import GPU_FREE_TIMEOUT_S, WORKERS_POLL_S
from dynaplan.fleet.rules.reloading import (
    WORKERS,
    ReloadRules,
    SettingChange,
    Taking,
    restarted,
    setting_changes,
)
from dynaplan.fleet.store_keys import LIVE_SETTINGS, SCALED_ROLES, live_settings_prefix
from dynaplan.graph.lifecycle import Worker, WorkerState
from dynaplan.store.model import Transaction
from dynaplan.util.errors import ConfigError, DeploymentError, DynaplanError, PermanentError, TemporaryError
from dynaplan.util.masking import mask_secrets
from dynaplan.util.tables import text_table

if TYPE_CHECKING:
    from dynaplan.config.frontend import PrefillDeadline
    from dynaplan.config.overrides import Sections
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.launch import Launch, Reload
    from dynaplan.graph.model import GraphSpec, ServiceSpec
    from dynaplan.store.port import KeyValueStore

LIVE_KEYS = {name.replace("_", "-"): name for name in LIVE_SETTINGS}
"""The options that change while requests flow, with the names of their keys in the store."""

UNLIMITED_QUEUE = 1_000_000
"""A limit of the prefill queue that is none."""

PLANNER = "Planner"

LOCK_FILE = "reload.lock"
"""The file in the runtime directory that a reload or an upgrade has locked."""

MAX_VALUE_CHARS = 40
"""Characters of a value in the table of the difference."""


@click.command(
    cls=ServiceOptionsCommand,
    name="reload",
    epilog="Any option of a service: --Service.key=value, from now on",
)
@namespace_argument
@config_file_option("Another YAML; default: the one that is served with.")
@click.option("--dry-run", is_flag=True, help="Show the difference, and change nothing.")
@click.option("-y", "--yes", is_flag=True, help="Apply it without asking.")
@step_timeout_option
@click.pass_context
def command(
    ctx: click.Context,
    namespace: str | None,
    config_file: str | None,
    dry_run: bool,
    yes: bool,
    timeout: float | None,
) -> None:
    """Read the YAML again, show what has changed, and apply it without dropping a request.

    Live settings change at once; for the others workers are replaced, a new one ready before the old one is
    drained, one after another. When a new worker fails everything goes back to the settings of before.
    """
    found = connect(namespace)
    launch, unfinished = _read_launch(found)
    new = _read_config(launch, config_file, ctx.obj)
    before = launch.config if unfinished is None else unfinished
    if launch.graph.on_demand:
        _reload_models(found, launch, replace(new, before=before), timeout, is_dry=dry_run, yes=yes)
        return
    changes = _changes(launch, before, new)
    if unfinished is not None:
        click.echo("The last reload did not come to its end; the difference is to the settings before it.")
    if not changes:
        click.echo(f"nothing has changed in {new.config_file or 'the settings'}")
        return
    click.echo(difference(changes))
    _refuse_fixed_settings(changes)
    if dry_run:
        return
    _confirm(yes)

    reloading = ReloadRun(found, launch.graph, replace(new, before=before), timeout)
    asyncio.run(reloading.run(live_keys(changes, new.config), restarted(changes, launch.graph)))


def difference(changes: Sequence[SettingChange]) -> str:
    """Return the table of the changed settings: each with its old and new value, and what it takes."""
    rows = [("SETTING", "OLD", "NEW", "TAKES")]
    rows += [
        (
            f"{each.service}.{each.key}",
            _format_value(each, each.before),
            _format_value(each, each.after),
            each.words,
        )
        for each in changes
    ]
    return text_table(rows)


def live_keys(changes: Sequence[SettingChange], config: Sections) -> dict[str, str]:
    """Return the values of the live settings that change, by the names of their keys in the store.

    What the new settings of ``config`` leave out has its default.
    """
    from dynaplan.config.settings.fields import options_of
    from dynaplan.config.settings.frontend import DisaggregationSettings

    usual: dict[str, Any] = {key: each.default for key, each in options_of(DisaggregationSettings).items()}
    unsaid = DisaggregationSettings(prefill_deadline_ms=_deadline(config).ms)
    usual["max-prefill-queue-size"] = int(min(unsaid.max_queued, UNLIMITED_QUEUE))
    usual["max-local-prefill-length"] = unsaid.max_local_tokens
    live = [each for each in changes if each.taking is Taking.LIVE]
    values = {each.key: usual[each.key] if each.is_removed else each.after for each in live}
    return {LIVE_KEYS[key]: str(value) for key, value in values.items()}


def _read_launch(found: RunningDeployment) -> tuple[Launch, Sections | None]:
    """Return the launch as it is now, and the settings before a reload that was killed, if one was."""
    from dynaplan.fleet.launch import last_reload, read_launch

    try:
        launch = read_launch(found.runtime_dir)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DeploymentError(
            f"cannot read how {found.namespace} was started: {error}",
            hint="Run this as the user who started `dynaplan serve`, with the same release.",
        ) from error
    last = last_reload(found.runtime_dir)
    return launch, last.before if last else None


def _read_config(launch: Launch, config_file: str | None, overrides: Sequence[str]) -> Reload:
    """Return the settings as a ``serve`` of now would read them; ConfigError with the key that is wrong."""
    from dynaplan.cli.serve import find_config, load_deployment, warn
    from dynaplan.cli.serve_checks import check_settings
    from dynaplan.fleet.launch import Reload
    from dynaplan.graph.config import DEPLOYMENT_CONFIG_VARIABLE

    here, directory = Path.cwd(), Path(launch.graph.working_dir)
    os.environ.pop(DEPLOYMENT_CONFIG_VARIABLE, None)
    named = str(here / config_file) if config_file and (here / config_file).is_file() else config_file
    name = named or launch.config_file or None
    if name is None and not overrides:
        raise ConfigError(
            "this deployment was started without a file of settings",
            hint="Name one: `dynaplan reload -f FILE`, or settings: `dynaplan reload --Service.key=value`.",
        )
    os.chdir(directory)
    all_overrides = (*launch.overrides, *overrides)
    graph, config, spec, warnings = load_deployment(
        launch.graph.identifier, name, directory, launch.namespace, all_overrides, lambda: len(launch.gpus)
    )
    warn(warnings + check_settings(graph, spec, config))
    file = find_config(name, directory, graph)
    if spec.on_demand or launch.graph.on_demand:
        return Reload(config, str(file or ""), all_overrides, graph=spec)
    _check_same_services(launch.graph, spec)
    return Reload(config, str(file or ""), all_overrides)


def _reload_models(
    found: RunningDeployment,
    launch: Launch,
    new: Reload,
    timeout: float | None,
    *,
    is_dry: bool,
    yes: bool,
) -> None:
    """Show what becomes of each model, and apply it; see ``reload_models``."""
    from dynaplan.cli.reload_models import model_changes, put_away
    from dynaplan.graph.lifecycle import Role

    assert new.before is not None
    changes = model_changes(new.before, new.config)
    if not changes:
        click.echo(f"nothing has changed in {new.config_file or 'the settings'}")
        return
    click.echo("\n".join(changes.lines))
    if is_dry:
        return
    _confirm(yes)
    roles = {Role.FRONTEND, Role.PLANNER} if changes.planners else {Role.FRONTEND}
    kept = [each.name for each in (new.graph or launch.graph).services]
    services = [each for each in launch.graph.services if each.role in roles and each.name in kept]
    reloading = ReloadRun(found, launch.graph, new, timeout)
    asyncio.run(reloading.run({}, services, lambda store: put_away(store, found.namespace, changes.changed)))


def _check_same_services(old: GraphSpec, new: GraphSpec) -> None:
    missing = {service.name for service in old.services} - {service.name for service in new.services}
    if missing:
        raise ConfigError(
            f"{old.identifier} has no {', '.join(sorted(missing))} any more",
            hint="Other services need a new serve: `dynaplan stop`, then `dynaplan serve` again.",
        )


def _changes(launch: Launch, before: Sections, new: Reload) -> tuple[SettingChange, ...]:
    from dynaplan.config.frontend import DEADLINE_OPTIONS
    from dynaplan.config.service_config import section_options
    from dynaplan.config.settings.fields import options_of
    from dynaplan.config.settings.frontend import DisaggregationSettings, RoutingSettings
    from dynaplan.config.settings.worker import engine_of
    from dynaplan.config.stock import matching_options
    from dynaplan.graph.config import resolve_graph
    from dynaplan.graph.lifecycle import Role
    from dynaplan.graph.loading import load_graph

    graph = launch.graph
    decode = graph.of_role(Role.DECODE)
    engine = engine_of(section_options(before, decode.name)) if decode else ""
    resolved = resolve_graph(
        load_graph(graph.identifier, Path(graph.working_dir)), new.config, launch.namespace
    )
    rules = ReloadRules(
        live=LIVE_KEYS.keys(),
        of_frontends=options_of(DisaggregationSettings).keys(),
        of_both=options_of(RoutingSettings).keys(),
        agreed={*matching_options(engine), "engine", "model"} if engine else (),
        gpus={service.name: service.gpus for service in resolved.services},
        of_planner=DEADLINE_OPTIONS if _deadline(before) != _deadline(new.config) else (),
        plans_for_targets=section_options(new.config, PLANNER).get("policy", "load") != "load",
    )
    return setting_changes(graph, flatten(graph, before), flatten(graph, new.config), rules)


def _deadline(config: Sections) -> PrefillDeadline:
    from dynaplan.config.frontend import configured_deadline
    from dynaplan.config.service_config import section_options

    return configured_deadline(config, section_options(config, PLANNER))


def flatten(graph: GraphSpec, config: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each service's settings as its processes read them, ``ServiceArgs`` as keys of their own.

    The frontends read the name of the model from ``Common``, too.
    """
    from dynaplan.config.frontend import NAMES
    from dynaplan.config.service_config import COMMON, SERVICE_ARGS, kebab_keys, section_options
    from dynaplan.graph.lifecycle import Role

    common = kebab_keys(config.get(COMMON) or {})
    sections: dict[str, dict[str, Any]] = {}
    for service in graph.services:
        names = {key: common[key] for key in NAMES if key in common and service.role is Role.FRONTEND}
        arguments = _leaves(SERVICE_ARGS, (config.get(service.name) or {}).get(SERVICE_ARGS) or {})
        own = section_options(config, service.name)
        sections[service.name] = {**names, **own, **arguments}
    return {
        name: {key: value for key, value in section.items() if value is not None or key == WORKERS}
        for name, section in sections.items()
    }


def _leaves(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    return {
        name: leaf for key, each in value.items() for name, leaf in _leaves(f"{path}.{key}", each).items()
    }


def _format_value(change: SettingChange, value: Any) -> str:
    text = str(mask_secrets({change.key: value})[change.key])
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"


def _refuse_fixed_settings(changes: Sequence[SettingChange]) -> None:
    """Raise ConfigError when a setting needs a new serve: a file is applied whole or not at all."""
    fixed = [f"{each.service}.{each.key}" for each in changes if each.taking is Taking.SERVE]
    if fixed:
        raise ConfigError(
            f"{', '.join(fixed)}: only a new serve changes {'that' if len(fixed) == 1 else 'these'}; "
            "nothing is changed",
            hint="Put the old value back, or `dynaplan stop` and serve again.",
        )


def _confirm(yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("reload asks before it changes anything, and nobody can answer", hint="Add -y.")
    click.confirm("Apply it?", default=True, abort=True)


async def _nothing(store: KeyValueStore) -> None:
    pass


class ReloadRun:
    """One reload of a deployment. ``new.before`` are the settings to go back to."""

    def __init__(
        self, found: RunningDeployment, graph: GraphSpec, new: Reload, timeout_s: float | None
    ) -> None:
        from dynaplan.fleet.launch import last_reload, read_launch

        self._found = found
        self._graph = graph
        self._new = new
        self._timeout_s = timeout_s
        launch = read_launch(found.runtime_dir)
        old = last_reload(found.runtime_dir)
        assert new.before is not None
        self._old = replace(
            old or new,
            config=new.before,
            config_file=launch.config_file,
            overrides=launch.overrides,
            before=None,
        )
        self._untouched: set[tuple[str, int]] = set()

    async def run(
        self,
        live: Mapping[str, str],
        services: Sequence[ServiceSpec],
        once_written: Callable[[KeyValueStore], Awaitable[None]] = _nothing,
    ) -> None:
        """Apply it; raises PermanentError when a new worker fails, after the way back.

        ``once_written`` is awaited when workers that start get the new settings.
        """
        from dynaplan.store import connections

        with reload_lock(self._found, "reload or upgrade"):
            store = connections.connect_store()
            try:
                await self._run(store, live, services, once_written)
            finally:
                await store.close()

    async def _run(
        self,
        store: KeyValueStore,
        live: Mapping[str, str],
        services: Sequence[ServiceSpec],
        once_written: Callable[[KeyValueStore], Awaitable[None]],
    ) -> None:
        begun_s = time.monotonic()
        self._untouched = {(each.name, each.pid) for each in self._workers()}
        before = await self._live(store, live)
        self._write(self._new)
        try:
            await self._put(store, live)
            await once_written(store)
            for service in services:
                await self._roll(store, service)
        except asyncio.CancelledError:
            self._write(self._old)
            await self._put(store, before)
            click.echo(
                "Interrupted: the settings are those of before, for every worker that starts from now on. "
                "Workers that were replaced already keep the new ones until `dynaplan restart`.",
                err=True,
            )
            raise
        except DynaplanError as error:
            await self._roll_back(store, before, services, error)
        self._write(replace(self._new, before=None))
        click.echo(f"reloaded after {time.monotonic() - begun_s:.1f} s")

    async def _roll(self, store: KeyValueStore, service: ServiceSpec) -> None:
        """Replace the workers of a service that still have the previous settings."""
        workers = [each for each in self._present(service) if (each.name, each.pid) in self._untouched]
        gpu_wait_s = 0.0
        for number, worker in enumerate(workers, 1):
            if not self._is_there(worker):
                continue  # it has crashed or left meanwhile: what came in its place has the new settings
            begun_s = time.monotonic()
            new, gpu_wait_s = await replace_worker(store, self._found, worker, self._timeout_s, gpu_wait_s)
            which = f"{number} of {len(workers)}: " if len(workers) > 1 else ""
            click.echo(f"{which}{worker.name} -> {new} after {time.monotonic() - begun_s:.1f} s")

    async def _roll_back(
        self,
        store: KeyValueStore,
        live: Mapping[str, str],
        services: Sequence[ServiceSpec],
        error: DynaplanError,
    ) -> None:
        """Restore the previous settings in every worker, and raise PermanentError with the cause."""
        click.echo(f"{error.args[0]}\nGoing back to the settings of before.", err=True)
        self._write(self._old)
        await self._put(store, live)
        replaced = {(each.name, each.pid) for each in self._workers()} - self._untouched
        try:
            for service in reversed(services):
                for worker in self._present(service):
                    if (worker.name, worker.pid) not in replaced:
                        continue
                    if worker.state is WorkerState.READY and service.role in SCALED_ROLES:
                        await replace_worker(store, self._found, worker, self._timeout_s, GPU_FREE_TIMEOUT_S)
                    elif worker.state is not WorkerState.BACKOFF:
                        await request_replacement(self._found, worker)
            await self._all_ready(services)
        except DynaplanError as second:
            raise PermanentError(
                f"{error.args[0]}; and on the way back: {second.args[0]}",
                hint="The settings are those of before. `dynaplan status` shows what runs.",
            ) from error
        raise PermanentError(
            f"the new settings do not work: {error.args[0]}",
            hint="Every worker has the settings of before. `dynaplan logs NAME` says more of a failed one.",
        ) from error

    async def _all_ready(self, services: Sequence[ServiceSpec]) -> None:
        """Return when no worker of these services is on its way; TemporaryError after a while."""
        longest_s = self._timeout_s or expected_times(
            self._found, {service.role: 1 for service in services}
        ).limit_s(starts=True, leaves=True)
        deadline_s = time.monotonic() + longest_s
        while True:
            states = {each.name: each.state for service in services for each in self._present(service)}
            others = [name for name, state in states.items() if state is not WorkerState.READY]
            if not others:
                return
            if time.monotonic() > deadline_s:
                raise TemporaryError(f"{', '.join(others)} not ready within {longest_s:g} s")
            await asyncio.sleep(WORKERS_POLL_S)

    def _write(self, settings: Reload) -> None:
        """Put the settings in the place of those before, whole or not at all."""
        from dynaplan.fleet.launch import RELOADED_FILE
        from dynaplan.fleet.runtime_dir import write_private

        file = self._found.runtime_dir / RELOADED_FILE
        new = file.with_suffix(".new")
        write_private(new, settings.to_json())
        new.replace(file)

    async def _live(self, store: KeyValueStore, names: Mapping[str, str]) -> dict[str, str]:
        """Return the values of these live keys now; empty for one that is not there."""
        prefix = live_settings_prefix(self._found.namespace)
        now = {item.key.removeprefix(prefix): item.value for item in await store.list(prefix)}
        return {name: now.get(name, "") for name in names}

    async def _put(self, store: KeyValueStore, values: Mapping[str, str]) -> None:
        """Write these live keys; delete those with an empty value."""
        prefix = live_settings_prefix(self._found.namespace)
        puts = {prefix + name: value for name, value in values.items() if value}
        deletes = tuple(prefix + name for name, value in values.items() if not value)
        if values:
            await store.commit(Transaction(puts=puts, deletes=deletes))
        for name, value in values.items():
            click.echo(f"{name}: {value or 'as configured'}, live")

    def _workers(self) -> tuple[Worker, ...]:
        from dynaplan.fleet.deployments import find_deployment

        return find_deployment(self._found.namespace).workers

    def _present(self, service: ServiceSpec) -> list[Worker]:
        return [each for each in self._workers() if each.component == service.name]

    def _is_there(self, worker: Worker) -> bool:
        return any((each.name, each.pid) == (worker.name, worker.pid) for each in self._workers())


@contextmanager
def reload_lock(found: RunningDeployment, what: str) -> Iterator[None]:
    """Lock the deployment against other reloads and upgrades; raises DeploymentError while one runs."""
    descriptor = os.open(found.runtime_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise DeploymentError(
            f"another {what} of {found.namespace} goes on", hint="Wait for its end."
        ) from None
    finally:
        os.close(descriptor)
