from __future__ import annotations

import json
from dataclasses import asdict

from dynaplan.fleet.counts import Targets
from dynaplan.planner.bursts.memory import BurstMemory, Decoding, ExpertTrial, Hedge, Standing, StandingTrial
from dynaplan.planner.model import PlannerState

STATE = PlannerState(
    bursts=BurstMemory(
        Standing(5.0, (StandingTrial(1.0, 0.5),), (StandingTrial(2.0),)),
        Hedge(trials=(ExpertTrial(Targets(1, 1)),), seconds=30.0, leasts=(Targets(1, 2),)),
    )
)


def test_a_state_is_read_as_it_was_written() -> None:
    assert PlannerState.from_json(json.loads(json.dumps(STATE.to_json()))) == STATE


def test_a_state_of_a_version_that_knew_one_least_and_a_number_that_decodes_is_read() -> None:
    document = json.loads(json.dumps({**STATE.to_json(), **asdict(STATE.bursts)}))
    document["hedge"]["least"] = document["hedge"].pop("leasts")[0]
    for trial in (*document["hedge"]["trials"], document["hedge"]["lived"]["trial"]):
        trial["decoding"] = 3.5
    for trial in (*document["standing"]["prefill"], *document["standing"]["decode"]):
        del trial["decoding"]
    read = PlannerState.from_json(document)
    assert read == STATE
    assert read.bursts.hedge.trials[0].decoding == Decoding()
