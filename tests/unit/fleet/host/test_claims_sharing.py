"""What deployments publish beside their claims."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dynaplan.fleet.gpu_claims import NodeClaims, claimants
from dynaplan.fleet.gpus import GpuPool, GpuShare, NodeGpus
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.process_table import identity_of

OURS, THEIRS = identity_of(os.getpid()), identity_of(os.getppid())
DEAD = replace(THEIRS, started_at=THEIRS.started_at - 1)

Deploy = Callable[[ProcessIdentity, str], tuple[NodeClaims, GpuShare]]


@pytest.fixture
def deploy(tmp_path: Path) -> Deploy:
    """Make a deployment with a claim on the GPU of its name, which has published its share."""

    def made(arbiter: ProcessIdentity, name: str) -> tuple[NodeClaims, GpuShare]:
        claims = NodeClaims(arbiter, name, tmp_path / "node")
        claims.claim([name])
        share = GpuShare(name, arbiter.pid, 1, 2, frozenset({"a", "b"}), pools=(GpuPool("W", 1, 1),))
        claims.publish(lambda seen: share)
        return claims, share

    return made


def seen_by(claims: NodeClaims, share: GpuShare) -> NodeGpus:
    found: list[NodeGpus] = []

    def look(seen: NodeGpus) -> GpuShare:
        found.append(seen)
        return share

    claims.publish(look)
    return found[0]


def test_each_sees_what_the_others_say_with_what_they_have_claimed(deploy: Deploy, tmp_path: Path) -> None:
    ours, share = deploy(OURS, "a")
    _, other = deploy(THEIRS, "b")
    others = replace(other, held=frozenset("b"))
    assert seen_by(ours, share) == NodeGpus(frozenset("a"), frozenset("ab"), (others,))
    assert set(ours.foreign(["a", "b"])) == {"b"}, "a share is no claim"
    assert len(claimants(tmp_path / "node")) == 2


def test_what_was_withdrawn_or_said_by_one_that_is_dead_counts_no_more(
    deploy: Deploy, tmp_path: Path
) -> None:
    deploy(DEAD, "a")
    ours, share = deploy(OURS, "b")
    assert seen_by(ours, share) == NodeGpus(frozenset("b"), frozenset("b"), ())
    ours.withdraw()
    ours.withdraw()
    assert not list((tmp_path / "node").glob("share-*"))


def test_an_unchanged_share_is_not_written_again(deploy: Deploy, tmp_path: Path) -> None:
    ours, share = deploy(OURS, "a")
    (file,) = (tmp_path / "node").glob("share-*")
    before = file.stat().st_ino, file.stat().st_mtime_ns
    ours.publish(lambda seen: share)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == before
    file.unlink()
    ours.publish(lambda seen: share)
    assert json.loads(file.read_text())["namespace"] == "a"


def test_what_another_user_says_is_ignored_and_its_claims_are_honoured(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy(THEIRS, "b")
    monkeypatch.setattr(os, "getuid", lambda: 4711)  # so the files there are another user's
    claims = NodeClaims(OURS, "a", Path(deploy(OURS, "a")[0]._directory))
    seen = seen_by(claims, deploy(OURS, "a")[1])
    assert seen.shares == ()
    assert "b" in seen.claimed


@pytest.mark.parametrize("text", ["", "{}", "[1]", "\0", '{"pid": 1}', "x" * 100_000])
def test_what_is_no_share_is_passed_over(deploy: Deploy, tmp_path: Path, text: str) -> None:
    ours, share = deploy(OURS, "a")
    (tmp_path / "node" / f"share-{THEIRS.pid}.{os.getuid()}.json").write_text(text)
    (tmp_path / "node" / "share-1.folder").mkdir()
    (tmp_path / "node" / "share-2.link").symlink_to("/dev/zero")
    assert seen_by(ours, share).shares == ()
