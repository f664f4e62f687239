"""The parts of the routing benchmark, on models that take no time: what they count and promise adds up."""

import pytest

from experiments.routing_costs import apart, handoff, headline, programs
from experiments.routing_costs.grid import Grid
from experiments.routing_costs.pair import PROMPT, Sizes
from molora_jax import benchmarking
from molora_jax.engine.request import EngineConfig

pytestmark = pytest.mark.slow
SIZES = Sizes(1, 64, 0), Sizes(2, 64, 1)


@pytest.fixture(scope="module")
def bench() -> benchmarking.Bench:
    return benchmarking.Bench("routing")


@pytest.fixture(scope="module")
def models():
    return [each.model() for each in SIZES]


def test_the_headline_has_every_ratio_of_the_summary(bench, models):
    grid = Grid(bench, models, 3, 16, 2)
    found = headline.headline(bench, grid, 0.3, (2, 3))
    assert list(found) == [
        *("delayed_over_eager", "predicted_delayed_over_eager", "fused_over_eager", "fused_over_naive"),
        *("routed_over_llm_only", "predicted_over_measured", "b_star_regret", "host_syncs_per_token"),
        *("padding_ratio", "compiles_after_warmup"),
    ]
    assert found["compiles_after_warmup"] == 0
    assert all(value > 0 for name, value in found.items() if name not in ("b_star_regret", "compiles_after_warmup"))
    policies = {row["policy"]: row for row in bench.rows if "policy" in row}
    assert {"small only", "large only", "eager", "delayed", "fused", "no cache", "dispatcher"} <= set(policies)
    assert policies["fused"]["looks"] < policies["eager"]["looks"]
    assert policies["eager"]["realised"] == policies["delayed"]["realised"]


def test_every_placement_is_timed(bench):
    config = EngineConfig(max_rows=2, max_length=PROMPT + 8, prefill_chunk=32, block=4)
    apart.apart(bench, SIZES, config, 8, 0.5, 1)
    rows = {row["placement"]: row for row in bench.rows if "placement" in row}
    assert list(rows) == ["fused", "threads", "threads, shadow", "step-synchronous", "processes"]
    assert all(0 < row["first_large_s"] < 1e9 for row in rows.values())


def test_published_programs_realise_about_their_share(bench, models):
    programs.published(bench, models, 2, 24, (0.3,), 1)
    rows = [row for row in bench.rows if "program" in row]
    assert [(row["program"], row["policy"]) for row in rows] == [
        (name, policy) for name in ("R2R", "R-Stitch", "ME") for policy in ("fused eager", "fused")
    ]
    assert all(0 <= row["realised"] <= 1 for row in rows)


def test_a_hand_off_is_told_in_milliseconds_and_in_decode_steps(bench, models):
    ratio = handoff.handoff(bench, models, (128, 256), 1)
    first, last = [row for row in bench.rows if row.get("step") == "hand-off" and "context" in row]
    assert ratio == pytest.approx(last["steps"] / first["steps"])
    assert first["steps"] == pytest.approx(first["raw_ms"] / first["decode_ms"])
