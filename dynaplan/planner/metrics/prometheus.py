"""The traffic of a deployment, read from a Prometheus server that scrapes its frontends."""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

from dynaplan.contract.traffic import Traffic
from dynaplan.http.client import HttpClient
from dynaplan.planner.metrics.exposition import (
    DEFAULT_PREFIX,
    ENDED,
    HISTOGRAMS,
    LENGTHS,
    OVER_ITL,
    OVER_TTFT,
    REFUSED_LABELS,
    REQUESTS,
    STARTED,
    TARGET_MS,
    Counts,
    ServedNames,
    is_bucket_bound,
    traffic_of,
)
from dynaplan.planner.timing import PROMETHEUS_TIMEOUT_S
from dynaplan.util.documents import parse_object
from dynaplan.util.errors import ConfigError

log = logging.getLogger(__name__)

MIN_SAMPLES = 2
"""The number of scrapes in an interval from which on the growth of a counter is known."""

MAX_COUNT = 1e15
"""The largest growth of a counter in an interval, in requests, tokens or seconds, that is believed."""

PRESENCE_GAUGE = "model_ready"
"""A gauge that a frontend has before its first request: without it the frontend is not scraped."""

REFUSED, SAMPLES, MODELS = "refused", "samples", "models"
"""Parts of the answer: the refused requests, the scrapes of a frontend, and the models that were served."""

SUCCESS = ',status="success"'
"""The selector of requests that were answered completely."""

NAMESPACE = "dynamo_namespace"
"""The label that names a frontend's namespace."""


class PrometheusTraffic:
    """Asks ``{endpoint}/api/v1/query`` once for each interval; see ``dynaplan.planner.ports.TrafficSource``.

    The counts are ``increase()`` over the interval, added up over all series of the namespace, so that means
    are over requests. Series without a ``dynamo_namespace`` count too, since Dynamo's own frontends have no
    such label unless something adds it. Prometheus needs two scrapes in the interval and extrapolates to its
    ends, so numbers of requests may be fractions. There is no dispersion: scrapes are too far apart for one.
    """

    def __init__(
        self,
        endpoint: str,
        namespace: str,
        *,
        model: str = "",
        is_one_of_several: bool = False,
        prefix: str = DEFAULT_PREFIX,
        timeout_s: float = PROMETHEUS_TIMEOUT_S,
    ) -> None:
        address = _parse_endpoint(endpoint)
        host = address.netloc.rpartition("@")[2]
        self._shown = f"{address.scheme}://{host}{address.path.rstrip('/')}/api/v1/query"
        self._headers = {"Content-Type": "application/x-www-form-urlencoded", **_authorization(address)}
        self._namespace = namespace
        self._model = model
        self._served = ServedNames(model)
        self._served.is_served = is_one_of_several
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._http = HttpClient()
        self._problem = ""
        self._has_warned_unlabelled = False

    async def pull(self) -> None:
        """Do nothing: the Prometheus server gathers the samples itself."""

    async def traffic(self, interval_s: float) -> Traffic:
        """Ask the server for the last ``interval_s`` seconds."""
        try:
            promql = query(self._prefix, self._namespace, interval_s, self._model)
            counts = self._counts(await self._answer(promql))
        except (OSError, ValueError) as error:
            return self._missing(interval_s, str(error) or type(error).__name__)
        samples = counts.get((SAMPLES, ""), 0.0)
        if (REQUESTS, "") not in counts and samples < MIN_SAMPLES:
            return self._missing(interval_s, _describe_samples(samples, interval_s, self._namespace))
        if unserved := self._served.unserved:
            return self._missing(interval_s, unserved)
        if self._problem:
            log.info("the traffic is read from Prometheus at %s again", self._shown)
        self._problem = ""
        return traffic_of(interval_s, counts)

    async def close(self) -> None:
        """Close the connection to the Prometheus server, if one was opened."""
        await self._http.close()

    async def _answer(self, promql: str) -> Any:
        body = urlencode({"query": promql}).encode()
        answer = await self._http.request("POST", self._shown, body, self._headers, timeout_s=self._timeout_s)
        try:
            document = parse_object(answer.body)
        except ValueError:
            raise ValueError(f"status {answer.status}, and not what Prometheus answers") from None
        if document.get("status") != "success":
            raise ValueError(f"status {answer.status}: {document.get('error')}")
        return document.get("data")

    def _counts(self, data: Any) -> Counts:
        """The counts in the answer to ``query``; ValueError when it is something else."""
        counts: Counts = {}
        is_unlabelled = False
        try:
            for series in data["result"]:
                labels, value = series["metric"], float(series["value"][1])
                if labels["is"] == MODELS:
                    self._served.note(labels["model"])
                elif 0 <= value <= MAX_COUNT:
                    part = REQUESTS if labels["is"] == REFUSED else labels["is"]
                    le = labels.get("le", "") or labels.get(TARGET_MS, "")
                    if le == "" or is_bucket_bound(le):
                        counts[part, le] = counts.get((part, le), 0.0) + value
                is_unlabelled |= not labels.get(NAMESPACE)
        except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
            raise ValueError(f"an answer without {error}") from None
        if is_unlabelled and not self._has_warned_unlabelled:
            self._has_warned_unlabelled = True
            log.warning(
                "Prometheus at %s has frontends without a %s: all of them count for %s",
                self._shown,
                NAMESPACE,
                self._namespace,
            )
        return counts

    def _missing(self, interval_s: float, problem: str) -> Traffic:
        if problem != self._problem:
            log.warning("no traffic from Prometheus at %s: %s", self._shown, problem)
        self._problem = problem
        return Traffic(interval_s, missing=f"Prometheus: {problem}")


def query(prefix: str, namespace: str, interval_s: float, model: str = "") -> str:
    """One PromQL query for everything: the label ``is`` of a series names the metric that it belongs to.

    The parts are the queries of Dynamo 1.6.1's planner, with sums and counts apart instead of divided.
    Prometheus takes an empty label for an absent one. With a ``model`` only its series count, whatever the
    case of its name, and refused requests, whose model is not known.
    """
    own = f"{NAMESPACE}=~{json.dumps(re.escape(namespace) + '|')}"
    its = f",model=~{json.dumps('(?i:' + re.escape(model) + ')|')}" if model else ""
    window = f"[{max(1, round(1000 * interval_s))}ms]"
    return " or ".join(_subqueries(f"{prefix}_", own, its, window))


def _subqueries(prefix: str, own: str, its: str, window: str) -> Iterator[str]:
    def growth(name: str, also: str = "", by: str = NAMESPACE, of_model: str = its) -> str:
        return f"sum by ({by}) (increase({prefix}{name}{{{own}{of_model}{also}}}{window}))"

    # Frontends before Dynamo 1.0 count no beginnings.
    yield _label(f"({growth(STARTED)} or {growth(ENDED, SUCCESS)})", REQUESTS)
    refused = "".join(f',{name}="{value}"' for name, value in REFUSED_LABELS.items())
    yield _label(growth(ENDED, refused, of_model=""), REFUSED)
    for name in HISTOGRAMS:
        for part in ("sum", "count"):
            yield _label(growth(f"{name}_{part}"), f"{name}_{part}")
    for name in LENGTHS:
        yield _label(growth(f"{name}_bucket", by=f"{NAMESPACE}, le"), f"{name}_bucket")
    for name in (OVER_TTFT, OVER_ITL):
        yield _label(growth(name, by=f"{NAMESPACE}, {TARGET_MS}"), name)
    scraped = f"max by ({NAMESPACE}) (count_over_time({prefix}{PRESENCE_GAUGE}{{{own}}}{window}))"
    yield _label(scraped, SAMPLES)
    if its:
        counters = (f"{STARTED}{{{own}}}", f"{ENDED}{{{own}{SUCCESS}}}")
        each = (f"count by ({NAMESPACE}, model) ({prefix}{counter})" for counter in counters)
        yield _label(f"({' or '.join(each)})", MODELS)


def _label(expression: str, name: str) -> str:
    return f'label_replace({expression}, "is", "{name}", "", "")'


def _parse_endpoint(endpoint: str) -> SplitResult:
    try:
        url = urlsplit(endpoint)
        is_address = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(
            f"Planner.prometheus-endpoint: {endpoint!r}",
            hint="Expected the address of a Prometheus server, as http://127.0.0.1:9090.",
        )
    return url


def _authorization(url: SplitResult) -> dict[str, str]:
    """Return the header for the user and the password in an address, if it has them."""
    if url.username is None:
        return {}
    pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _describe_samples(samples: float, interval_s: float, namespace: str) -> str:
    if samples:
        return (
            f"the frontends were scraped once in {interval_s:g} s: a scrape_interval of at most "
            f"{interval_s / 3:g} s, or a longer adjustment-interval, would tell"
        )
    return f"nothing of a frontend of namespace {namespace} in the last {interval_s:g} s"
