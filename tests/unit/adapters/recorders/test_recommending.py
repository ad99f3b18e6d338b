"""The process that recommends by a recording, and the file that is left of it."""

import json
import os
import time

import pytest

from dynaplan.adapters.recorders.recommending import Recommender, read_recommendation
from dynaplan.domain.errors import TemporaryError

CONFIG = json.dumps({"VllmWorker": {"remote-prefill": False}})


@pytest.fixture
def recording(tmp_path):
    path = tmp_path / "traffic.jsonl"
    rows = ({"arrival_s": each / 2, "prompt_tokens": 100, "output_tokens": 5} for each in range(40))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


async def test_a_recording_is_simulated_beside_and_the_words_are_kept(tmp_path, recording):
    recommender = Recommender(tmp_path)
    assert recommender.age_s() is None

    words = await recommender.recommend(CONFIG, ["--trace", str(recording), "--gpus", "2", "--last", "10"])

    assert words.startswith("stay with load: 100.0% in time with 1.0 GPUs")
    kept = read_recommendation(tmp_path)
    assert kept and kept.words == words and abs(kept.at_unix_s - time.time()) < 60
    assert [row["requests"] for row in json.loads((tmp_path / "recommendation.json").read_text())] == [21] * 3
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("recommendation.*")} == {0o600}
    os.utime(tmp_path / "recommendation.json", (0, 0))
    assert recommender.age_s() == pytest.approx(time.time(), rel=0.01)


async def test_a_failure_is_told_by_the_last_line_and_keeps_the_recommendation_before(tmp_path):
    before = [{"policy": "load", "recommended": "stay"}]
    (tmp_path / "recommendation.json").write_text(json.dumps(before))
    with pytest.raises(TemporaryError, match=r"Expected|cannot read"):
        await Recommender(tmp_path).recommend(CONFIG, ["--trace", str(tmp_path / "none.jsonl")])
    assert read_recommendation(tmp_path).words == "stay"


@pytest.mark.parametrize("text", ["", "[]", "[1]", "{", '[{"policy": "load"}]'])
def test_what_cannot_be_read_is_no_recommendation(tmp_path, text):
    (tmp_path / "recommendation.json").write_text(text)
    assert read_recommendation(tmp_path) is None
