"""The machine-wide claims on GPUs."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import signal
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from dynaplan.fleet.gpu_claims import NodeClaims, live_claim_owners
from dynaplan.process import node_directory
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.node_directory import node_dir
from dynaplan.process.process_table import boot_id, identify, identity_of, is_alive
from dynaplan.util.errors import DeploymentError

OURS, THEIRS = identity_of(os.getpid()), identity_of(os.getppid())
"""Two processes that live as long as the test does, in the place of two arbiters."""
DEAD = replace(THEIRS, started_at=THEIRS.started_at - 1)
"""Its pid was given to another process since."""


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return tmp_path / "gpus"


def test_claims_lie_in_the_directory_that_the_environment_names() -> None:
    assert node_dir({"DYNAPLAN_NODE_DIR": "/x"}) == Path("/x")
    assert node_dir({}) == Path("/tmp/dynaplan-gpus")


def test_a_gpu_has_one_owner_on_the_whole_machine(node: Path) -> None:
    ours, theirs = NodeClaims(OURS, "a", node), NodeClaims(THEIRS, "b", node)
    assert ours.claim(["GPU-0", "GPU-1"]) == {"GPU-0", "GPU-1"}
    assert theirs.claim(["GPU-1", "GPU-2"]) == {"GPU-2"}
    assert ours.claim(["GPU-1", "GPU-2"]) == {"GPU-1"}
    user = pwd.getpwuid(os.getuid()).pw_name
    assert ours.held_by_others(["GPU-1", "GPU-2"]) == {
        "GPU-2": f"claimed by deployment 'b' (serve pid {THEIRS.pid}, user {user})"
    }


def test_a_gpu_given_back_can_be_claimed_and_only_its_owner_gives_it_back(node: Path) -> None:
    ours, theirs = NodeClaims(OURS, "a", node), NodeClaims(THEIRS, "b", node)
    ours.claim(["GPU-0", "GPU-1"])
    theirs.release(["GPU-0", "GPU-1"])
    assert theirs.claim(["GPU-0"]) == set()
    ours.release(["GPU-0"])
    assert theirs.claim(["GPU-0", "GPU-1"]) == {"GPU-0"}


def test_a_claim_that_a_signal_interrupts_can_be_given_back(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = NodeClaims(OURS, "a", node)
    ours.claim([])
    monkeypatch.setattr(os, "fchmod", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        ours.claim(["GPU-0"])
    ours.release(["GPU-0"])
    assert list(node.iterdir()) == []


@pytest.mark.parametrize("gone", [DEAD, replace(THEIRS, boot_id="another boot"), ProcessIdentity(0, 0, "")])
def test_the_claim_of_a_dead_arbiter_is_void(node: Path, gone: ProcessIdentity) -> None:
    NodeClaims(gone, "old", node).claim(["GPU-0"])
    ours = NodeClaims(OURS, "new", node)
    assert ours.held_by_others(["GPU-0"]) == {}
    assert ours.claim(["GPU-0"]) == {"GPU-0"}
    assert NodeClaims(THEIRS, "b", node).claim(["GPU-0"]) == set()


def test_claims_that_a_killed_deployment_has_left_go_when_the_user_claims_again(node: Path) -> None:
    NodeClaims(DEAD, "killed", node).claim(["GPU-0", "GPU-1"])
    NodeClaims(THEIRS, "other", node).claim(["GPU-2"])
    NodeClaims(OURS, "next", node).claim(["GPU-3"])
    assert sorted(each.name.split(".")[0] for each in node.iterdir()) == ["GPU-2", "GPU-3"]


def test_a_claims_file_is_marked_as_its_arbiters(node: Path) -> None:
    ours, theirs = NodeClaims(OURS, "a", node), NodeClaims(THEIRS, "b", node)
    ours.claim(["GPU-0"])
    ((path, mark),) = ours.claim_files(["GPU-0"])
    assert mark in path.read_text()
    ((same, other_mark),) = theirs.claim_files(["GPU-0"])
    assert same == path
    assert other_mark not in path.read_text()


def test_everybody_may_claim_and_nobody_may_remove_the_claims_of_others(node: Path) -> None:
    NodeClaims(OURS, "a", node).claim(["GPU-0"])
    assert stat.S_IMODE(node.stat().st_mode) == 0o1777
    assert stat.S_IMODE(next(node.iterdir()).stat().st_mode) == 0o644


def test_a_directory_behind_a_link_is_refused(node: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    node.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeploymentError, match="DYNAPLAN_NODE_DIR"):
        NodeClaims(OURS, "a", node).claim(["GPU-0"])


def test_a_directory_where_anybody_may_remove_claims_is_refused(node: Path) -> None:
    node.mkdir()
    node.chmod(0o777)
    with pytest.raises(DeploymentError, match="everybody may remove files"):
        NodeClaims(OURS, "a", node).claim(["GPU-0"])


def test_a_directory_for_claims_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(DeploymentError, match="No such file or directory"):
        NodeClaims(OURS, "a", tmp_path / "no" / "gpus").claim(["GPU-0"])


def test_a_lock_that_is_never_given_back_is_told(node: Path) -> None:
    claims = NodeClaims(OURS, "a", node, lock_timeout_s=0.0)
    claims.claim([])
    fd = os.open(node, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(DeploymentError, match="temporarily unavailable"):
            claims.claim(["GPU-0"])
    finally:
        os.close(fd)


def test_what_is_no_claim_counts_for_nothing(node: Path, tmp_path: Path) -> None:
    theirs = NodeClaims(THEIRS, "b", node)
    theirs.claim(["GPU-0"])
    (claim,) = node.iterdir()
    text = claim.read_text()
    claim.unlink()
    (node / claim.name.replace(f".{os.getuid()}.", f".{os.getuid() + 1}.")).write_text(text)
    (node / "torn.json").write_text(text[:20])
    (node / "list.json").write_text("[]")
    (tmp_path / "outside").write_text(text)
    (node / claim.name).symlink_to(tmp_path / "outside")
    os.mkfifo(node / "pipe.json")
    (node / "folder.json").mkdir()
    assert NodeClaims(OURS, "a", node).claim(["GPU-0"]) == {"GPU-0"}
    assert json.loads((tmp_path / "outside").read_text())["namespace"] == "b"


def test_a_process_is_recognised_by_its_start_and_its_boot() -> None:
    assert identify(os.getpid()) == OURS.started_at
    assert boot_id() == OURS.boot_id
    assert is_alive(OURS)
    assert not is_alive(replace(OURS, started_at=OURS.started_at + 1))
    assert not is_alive(replace(OURS, boot_id="another"))
    assert identify(2**22 + 1) is None
    assert identify(0) is None
    with pytest.raises(ProcessLookupError):
        identity_of(2**22 + 1)


def test_claims_that_a_cleaner_took_away_are_made_again_at_the_next_look(
    node: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine, other = NodeClaims(OURS, "a", node), NodeClaims(THEIRS, "b", node)
    assert mine.claim(["GPU-1", "GPU-2", "GPU-3"]) == {"GPU-1", "GPU-2", "GPU-3"}
    mine.release(["GPU-3"])
    shutil.rmtree(node)
    assert other.claim(["GPU-2"]) == {"GPU-2"}
    assert list(mine.held_by_others(["GPU-1", "GPU-2", "GPU-3"])) == ["GPU-2"]
    assert "our claim file for GPU-1" in caplog.text
    assert "GPU-2 was deleted, and the GPU is now claimed by deployment" in caplog.text
    assert list(other.held_by_others(["GPU-1", "GPU-2", "GPU-3"])) == ["GPU-1"]


def test_simulated_gpus_are_each_deployments_own_unless_the_directory_is_named(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DYNAPLAN_NODE_DIR", raising=False)
    monkeypatch.setattr(node_directory, "DEFAULT_DIRECTORY", str(node))
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "alice"))
    ours, beside = NodeClaims(OURS, "a"), NodeClaims(THEIRS, "b")
    assert ours.claim(["GPU-SIM-0", "GPU-1"]) == {"GPU-SIM-0", "GPU-1"}
    assert beside.claim(["GPU-SIM-0", "GPU-1"]) == {"GPU-SIM-0"}
    worker_of_ours = NodeClaims(THEIRS, "a", worker="a_VllmWorker_box_7")
    assert worker_of_ours.claim(["GPU-SIM-0", "GPU-SIM-1"]) == {"GPU-SIM-1"}
    assert set(ours.held_by_others(["GPU-SIM-0", "GPU-SIM-1", "GPU-1"])) == {"GPU-SIM-1"}
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "bob"))
    assert NodeClaims(THEIRS, "a").claim(["GPU-SIM-0"]) == {"GPU-SIM-0"}
    ours.release(["GPU-SIM-0"])
    assert worker_of_ours.held_by_others(["GPU-SIM-0"]) == {}
    assert set(live_claim_owners(node)) == {OURS.pid, THEIRS.pid}


def test_a_worker_claims_for_itself_and_is_no_deployment(node: Path) -> None:
    worker = NodeClaims(THEIRS, "box", node, worker="box_VllmWorker_gpu1_7")
    assert worker.claim(["GPU-0"]) == {"GPU-0"}
    (holder,) = NodeClaims(OURS, "box", node).held_by_others(["GPU-0"]).values()
    assert holder.startswith(f"claimed by worker 'box_VllmWorker_gpu1_7' (pid {THEIRS.pid}, user ")
    assert live_claim_owners(node) == {}
