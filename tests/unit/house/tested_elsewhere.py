"""Modules that no test imports and that have no unit test of their own: the suites that run them."""

from __future__ import annotations

TESTED_ELSEWHERE = {
    "attack/test_large_bodies.py": [
        "serving/frontend/bodies/process",
        "serving/frontend/bodies/receiving",
    ],
    "attack/test_forgiven_crashes.py": ["serving/frontend/forgiving"],
    "contract/test_queue.py": ["adapters/messaging/jetstream"],
    "contract/test_sim_engine.py": [
        "adapters/engines/sim/api",
        "adapters/engines/sim/driver",
        "adapters/engines/sim/engine",
    ],
    "e2e/test_answers.py": ["cli/deployment", "cli/logs", "serving/services"],
    "e2e/test_profile_sla.py": ["cli/profile_sla"],
    "e2e/test_scaling.py": ["cli/scale", "cli/why"],
    "e2e/test_shutdown.py": ["cli/serve", "cli/stop"],
    "integration/test_frontend.py": [
        "serving/frontend/admission",
        "serving/frontend/answering",
        "serving/frontend/forwarding",
        "serving/frontend/malformed",
        "serving/frontend/requests",
        "serving/frontend/trials",
        "serving/frontend/upstream",
        "serving/routing/prefix_watch",
        "serving/routing/reservation",
        "serving/routing/worker_router",
    ],
    "integration/test_llamacpp.py": ["adapters/engines/llamacpp/desk"],
    "integration/test_profile_pictures.py": ["profiler/pictures"],
    "integration/test_supervisor.py": [
        "supervisor/arbiter",
        "supervisor/fleet/document",
        "supervisor/fleet/plugin",
        "supervisor/fleet/store_link",
        "supervisor/preparation",
        "supervisor/shutdown",
    ],
    "integration/test_worker_process.py": ["runtime/life"],
    "unit/adapters/engines/common/test_server_engine.py": ["adapters/engines/common/server_client"],
    "unit/adapters/engines/test_vllm_guard.py": ["data/vllm/dynaplan_vllm_guard"],
    "unit/adapters/forecasters/test_library_forecaster.py": [
        "adapters/forecasters/libraries",
        "adapters/forecasters/process",
        "adapters/forecasters/process_main",
    ],
    "unit/adapters/recorders/test_jsonl.py": ["adapters/recorders/appending_file"],
    "unit/adapters/traces/test_reading.py": ["adapters/traces/formats"],
    "unit/cli/test_checking.py": ["cli/overriding"],
    "unit/core/fleet/test_reconcile.py": ["core/fleet/observing"],
    "unit/core/forecasting/test_forecaster_methods.py": [
        "core/forecasting/autoregression",
        "core/forecasting/seasonal",
    ],
    "unit/core/planning/test_sla_policy.py": ["adapters/profiles/sla_model", "core/sizing/measured_load"],
    "unit/core/sizing/test_pool_sizes.py": ["core/sizing/search"],
    "unit/options/test_service_config.py": ["options/engine_sizes", "options/known", "options/yaml_file"],
    "unit/planner/test_forecasts.py": ["adapters/forecasters/core_forecaster"],
    "unit/sdk/test_graph.py": ["sdk/importing", "sdk/links"],
    "unit/serving/prefill/test_remote_prefill.py": ["serving/prefill/depth"],
    "unit/simulator/oracle/test_oracle.py": [
        "simulator/oracle/local_search",
        "simulator/oracle/lower_bound",
        "simulator/oracle/pool_models",
        "simulator/oracle/schedule_planner",
        "simulator/oracle/trace_arrays",
    ],
    "unit/simulator/test_service.py": ["simulator/pools"],
}
"""Suite -> modules."""
