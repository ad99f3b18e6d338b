from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging, sys
from pathlib import Path
from dynaplan.process.logfile import LogFile, configure_logging

log = LogFile(Path(sys.argv[1]), largest_bytes=int(sys.argv[2]), kept=3)
log.redirect()
configure_logging()
for number in range(6):
    print(f"printed {number}", "x" * 60)
    log.turn_over_if_full()
logging.getLogger("some.name").warning("logged")
import os
os.system("echo said by a child process")
"""


DELETED = """
import sys
from pathlib import Path
from dynaplan.process.logfile import LogFile

log = LogFile(Path(sys.argv[1]), largest_bytes=int(sys.argv[2]))
log.redirect()
print("x" * 60)
Path(sys.argv[1]).unlink()
log.turn_over_if_full()
print("after it was deleted")
"""

FLOOD = """
import sys
from pathlib import Path
from dynaplan.process.logfile import LogFile, write_bounded

LogFile(Path(sys.argv[1]), largest_bytes=int(sys.argv[2])).redirect()
for number in range(10_000):
    write_bounded(f"line {number} {'x' * 60}\\n".encode())
"""

WITHOUT_DESCRIPTORS = """
import resource, sys
from pathlib import Path
from dynaplan.process.logfile import LogFile

log = LogFile(Path(sys.argv[1]), largest_bytes=int(sys.argv[2]), kept=3)
log.redirect()
print("x" * 60)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
for _ in range(4):
    log.turn_over_if_full()
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
log.turn_over_if_full()
print("after it was full")
"""


def run(path: Path, largest_bytes: int = 50, script: str = SCRIPT) -> None:
    command = [sys.executable, "-c", script, str(path), str(largest_bytes)]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout == done.stderr == b""


def test_everything_a_process_prints_goes_into_its_private_file(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "worker.log"
    run(path)
    text = path.read_text()
    assert "WARNING some.name: logged\n" in text
    assert text.endswith("said by a child process\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_file_is_turned_over_and_three_old_ones_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    run(path)
    assert sorted(os.listdir(tmp_path)) == ["worker.log", "worker.log.1", "worker.log.2", "worker.log.3"]
    assert "printed 5" in (tmp_path / "worker.log.1").read_text()
    assert "printed 3" in (tmp_path / "worker.log.3").read_text()


def test_what_another_program_prints_in_one_go_does_not_fill_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    run(path, largest_bytes=10_000, script=FLOOD)
    sizes = {each: (tmp_path / each).stat().st_size for each in os.listdir(tmp_path)}
    assert sizes.keys() == {"worker.log", "worker.log.1", "worker.log.2", "worker.log.3"}
    assert max(sizes.values()) < 11_000
    assert "line 9999 " in path.read_text() + (tmp_path / "worker.log.1").read_text()
    assert "the log was full" in (tmp_path / "worker.log.1").read_text()


def test_a_deleted_log_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    run(path, script=DELETED)
    assert path.read_text() == "after it was deleted\n"


def test_a_file_that_cannot_be_opened_raises_nothing_and_costs_no_old_log(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    for number in (1, 2):
        path.with_name(f"worker.log.{number}").write_text(f"old {number}\n")
    run(path, script=WITHOUT_DESCRIPTORS)
    assert path.read_text() == "after it was full\n"
    assert path.with_name("worker.log.2").read_text() == "old 1\n"
    assert path.with_name("worker.log.3").read_text() == "old 2\n"


def test_a_restarted_worker_appends(tmp_path: Path) -> None:
    path = tmp_path / "worker.log"
    path.write_text("before\n")
    path.chmod(0o600)
    run(path, largest_bytes=10_000)
    assert path.read_text().startswith("before\nprinted 0")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    path = tmp_path / "worker.log"
    path.symlink_to(target)
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path), "50"], capture_output=True, check=False)
    assert done.returncode != 0
    assert not target.exists()
