"""``serve`` with a certificate and a token of the user's: https for clients, the token for other hosts."""

from __future__ import annotations

import ssl
import urllib.request
from contextlib import closing
from pathlib import Path

from tests.e2e.deployment import Deployment
from tests.fakes.certificates import Authority
from tests.fakes.polling import wait_until


def test_the_public_port_speaks_https_and_the_planner_reads_its_traffic(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certificates")
    files = authority.issue("llm", "subjectAltName=DNS:localhost")
    authority.issue("other")
    tls = ("--tls-cert", str(files.certificate), "--tls-key", str(files.key))
    planning = ("--Planner.policy=sla", "--Planner.profile-results-dir=h200_sxm-Llama-3.1-8B-Instruct-FP8")
    quickly = ("--Planner.metric-pulling-interval=0.5", "--Planner.adjustment-interval=1")
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("a-token-that-other-hosts-have")
    options = ("--store", "file", *tls, *planning, *quickly, "--token-file", str(token), "--compat", "dynamo")
    running = Deployment(tmp_path, "graphs.agg:Frontend", "agg.yaml", *options)
    with closing(running):
        refused = running.run("serve", "graphs.agg:Frontend", *tls[:3], f"{authority.directory}/other.key")
        assert refused.returncode == 2
        assert "other.key does not belong to the certificate" in refused.stderr
        running.start()
        told = running.clients_environment()  # what programs that join have from it
        assert told["DYNAPLAN_WORKER_TOKEN"] == "a-token-that-other-hosts-have"
        assert told["DYNAPLAN_COMPAT"] == "dynamo"
        url = running.url.replace("127.0.0.1", "localhost")
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(authority.certificate))
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10, context=trusting) as answer:
            assert answer.status == 200
        assert f"curl -kN {running.url}/v1/chat/completions" in running.text
        wait_until(lambda: "no requests are expected" in running.run("why").stdout)
        assert running.stop() == 0
        wait_until(lambda: "Ready after" in running.text)
