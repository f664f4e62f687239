"""The tables and the SUMMARY line of a reproduction, from the raw results of its jobs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from molora_jax import benchmarking
from molora_jax.config import UserError
from molora_jax.evaluation import comparison, pair_report, report
from molora_jax.evaluation.comparison import Comparison
from molora_jax.evaluation.pair import RANDOM, TRAINED
from molora_jax.evaluation.reproduction import jobs
from molora_jax.evaluation.reproduction.controls import SHUFFLED
from molora_jax.evaluation.reproduction.experts import REWARDED, SUPERVISED
from molora_jax.evaluation.reproduction.mixtures import ROUTER_ALONE
from molora_jax.evaluation.reproduction.plan import ADDED, LATE, MIXED, REMOVED, SINGLE
from molora_jax.evaluation.reproduction.sequences import PASSES_OF_OWN
from molora_jax.evaluation.routing import Routing

SOFT = ("soft", "top2", "switch", "loramoe", "mixlora", "smear", "xlora", "mole", "phatgoose", "lorahub", "soup")
"""What hard routing is compared with: mixtures and scaled choices that are trained."""

HARD = "hard_dense"
"""The hard choice that the numbers are of: top-1 at unit scale as `hard`, whose router learns from all experts."""


def write(results: Path) -> dict[str, float]:
    """Writes `tables.md` and plots into the folder, prints them, and gives the numbers of the SUMMARY line.

    Raises:
      UserError: what `read` raises.
    """
    wholes = read(results)
    found = {stage: [whole["found"] for whole in own] for stage, own in wholes.items()}
    parts, keys = [], {}
    for stage, tables in (
        ("experts", _experts),
        ("controls", _controls),
        ("mixtures", _mixtures),
        ("gates", _gates),
        ("sequences", _sequences),
        ("pair", _pair),
    ):
        if stage in found:
            text, numbers = tables(found[stage])
            parts.append(text)
            keys |= numbers
    text = "\n\n".join(["# The testbed's results", "`python -m experiments.reproduce`", _origin(wholes), *parts])
    (results / "tables.md").write_text(text + "\n")
    print(text)
    if "mixtures" in found:
        routed = found["mixtures"][0]["routing"]
        first = routed.get(HARD, routed["hard"])
        shown = Routing(**first | dict(confusion=np.array(first["confusion"])))
        report.draw(results / "routing_hard.png", shown, "hard routing, first seed")
    if "pair" in found:
        pair_report.write(results / "pair", found["pair"])
    if keys:
        benchmarking.print_summary(keys)
    return keys


def read(results: Path) -> dict[str, list[dict[str, Any]]]:
    """The jobs' files by stage, in the order of the seeds.

    Raises:
      UserError: the folder has no results, or a stage has some of different plans.
    """
    paths = sorted((results / "raw").glob("*_*.json"))
    if not paths:
        raise UserError(f"reproduce: got no results in {results / 'raw'}, expected some: run it without --summary")
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(paths, key=lambda p: int(p.stem.rpartition("_")[2])):
        whole = json.loads(path.read_text())
        found.setdefault(whole["stage"], []).append(whole)
    for stage, own in found.items():
        if not all(jobs.alike(stage, own[0]["plan"], other["plan"]) for other in own):
            seeds = ", ".join(str(whole["seed"]) for whole in own)
            raise UserError(
                f"reproduce: got {stage} of the seeds {seeds} by different plans in {results / 'raw'}, expected one "
                "plan: delete the files of the others"
            )
    return found


def _origin(wholes: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Of each stage its seeds, the commits that they are of, and the minutes that they took."""
    lines = []
    for stage, own in wholes.items():
        commits = sorted({str(whole["machine"].get("commit")) for whole in own})
        seeds, minutes = ", ".join(str(whole["seed"]) for whole in own), sum(whole["minutes"] for whole in own)
        lines.append(f"- {stage}: seeds {seeds}; commit {', '.join(commits)}; {minutes:.0f} minutes of a core")
    return "\n".join(lines)


def _shares(runs: Sequence[Comparison], system: str, name: str) -> str:
    found = [100 * run.accuracy(system, name).share for run in runs if system in run.right]
    spread = f" ± {np.std(found, ddof=1):.1f}" if len(found) > 1 else ""
    return f"{np.mean(found):.1f}{spread}" if found else ""


def _experts(found: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, float]]:
    rows, gains = [], {}
    for name in SINGLE:
        runs = [Comparison.of(seed["domains"][name]) for seed in found]
        gain = comparison.difference(runs, REWARDED, SUPERVISED, [name])
        gains[name] = gain.mean
        rows.append([name, *(_shares(runs, s, name) for s in ("base", SUPERVISED, REWARDED)), gain.points])
    head = ["domain", "base", "supervised start", "after rewards", "gain by rewards"]
    text = "## Experts by verifiable rewards (accuracy in percent)\n\n" + benchmarking.markdown([head, *rows])
    return text, dict(rlvr_gain_min_of_best3=100 * sorted(gains.values())[-3])


def _controls(found: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, float]]:
    rows = []
    for name in found[0]["domains"]:
        runs = [Comparison.of(seed["domains"][name]) for seed in found]
        gain = comparison.difference(runs, SHUFFLED, SUPERVISED, [name])
        rows.append([name, _shares(runs, SUPERVISED, name), _shares(runs, SHUFFLED, name), gain.points])
    head = ["domain", "supervised start", "after shuffled rewards", "gain by shuffled rewards"]
    title = "## Their controls, whose rewards are shuffled (accuracy in percent)"
    return f"{title}\n\n{benchmarking.markdown([head, *rows])}", {}


def _mixtures(found: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, float]]:
    runs = [Comparison.of(seed["comparison"]) for seed in found]
    mean = lambda system, names: np.mean([run.accuracy(system, name).share for run in runs for name in names])
    soft = max((s for s in SOFT if s in runs[0].right), key=lambda s: mean(s, MIXED))
    differences = {
        "hard_minus_own_expert": ("oracle", SINGLE),
        "hard_minus_best_soft_mixed": (soft, MIXED),
        "hard_minus_prompt_classifier_mixed": ("prompt classifier", MIXED),
        "hard_minus_joint_mixed": ("joint LoRA", MIXED),
    }
    gap = lambda ours, key: comparison.difference(runs, ours, *differences[key])
    rows = []
    for key, (theirs, names) in differences.items():
        where = "one domain" if names == SINGLE else "several domains"
        rows += [[kind, theirs, where, gap(kind, key).points] for kind in (HARD, "hard") if kind in runs[0].right]
    rows += _router_alone(runs) + _changed(runs)
    counts = {name: sum(own.values()) for name, own in found[0]["parameters"].items()}
    text = "\n\n".join(
        [
            "## Compositions (accuracy in percent, mean ± standard deviation over seeds)",
            comparison.table(runs),
            benchmarking.markdown([["points of", "over", "prompts of", "difference (95 % interval)"], *rows]),
            _routing(found, counts),
        ]
    )
    best = HARD if HARD in counts else "hard"
    keys = {key: 100 * gap(best, key).mean for key in differences if key != "hard_minus_joint_mixed"}
    return text, keys | dict(trainable_ratio_soft_over_hard=counts[soft] / counts[best])


def _router_alone(runs: Sequence[Comparison]) -> list[list[str]]:
    """What the router gives without the attention LoRA that every token has, which neither bound has."""
    bounds = (("oracle", "one domain", SINGLE), ("prompt classifier", "several domains", MIXED))
    return [
        [ROUTER_ALONE, theirs, where, comparison.difference(runs, ROUTER_ALONE, theirs, names).points]
        for theirs, where, names in bounds
        if ROUTER_ALONE in runs[0].right
    ]


def _changed(runs: Sequence[Comparison]) -> list[list[str]]:
    """An expert that came later, or left, against the router of all."""
    whole = HARD if HARD in runs[0].right else "hard"
    others = tuple(name for name in SINGLE if name != LATE)
    places = {"one domain": SINGLE, "several domains": MIXED, LATE: (LATE,), f"one domain but {LATE}": others}
    return [
        [ours, whole, where, comparison.difference(runs, ours, whole, names).points]
        for ours in (ADDED, REMOVED)
        for where, names in places.items()
        if ours in runs[0].right
    ]


def _routing(found: Sequence[Mapping[str, Any]], counts: Mapping[str, int]) -> str:
    names = report.NUMBERS
    rows = []
    for kind in found[0]["routing"]:
        own = [seed["routing"][kind] for seed in found]
        value = lambda n, own=own: (
            np.mean([np.mean(r["by_layer"][n]) for r in own]) if n in own[0]["by_layer"] else None
        )
        shown = ["" if (v := value(n)) is None else f"{v:.3f}" for n in names]
        mine = np.mean([_own_share(r) for r in own])
        rows.append([kind, f"{counts[kind]:,}", *shown, f"{mine:.3f}"])
    head = ["composition", "trained parameters", *names, "share of the domain's own expert"]
    return benchmarking.markdown([head, *rows])


def _own_share(routing: Mapping[str, Any]) -> float:
    """Of the tokens, by domain, how many go to the domain's own expert."""
    at = [routing["experts"].index(name) for name in routing["domains"]]
    return float(np.mean([routing["confusion"][i][j] for i, j in enumerate(at)]))


def _gates(found: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, float]]:
    domains = list(found[0]["domains"])
    runs = {name: [Comparison.of(seed["domains"][name]) for seed in found] for name in domains}
    rows = []
    for kind, parameters in found[0]["parameters"].items():
        gaps = [comparison.difference(runs[name], kind, "equal", [name]) for name in domains]
        cells = [f"{_shares(runs[name], kind, name)}; {gap.points}" for name, gap in zip(domains, gaps, strict=True)]
        rows.append([kind, f"{parameters:,}", *cells])
    gap = lambda run, name: run.accuracy("malora", name).share - run.accuracy("equal", name).share
    each = [100 * np.mean([gap(runs[name][i], name) for name in domains]) for i in range(len(found))]
    text = "## Gates against LoRA of as many parameters (`equal`; accuracy in percent, and points over it)\n\n"
    text += benchmarking.markdown([["kind", "parameters", *domains], *rows])
    text += "\n\nMaLoRA minus LoRA by seed: " + ", ".join(f"{value:+.1f}" for value in each) + " points."
    return text, dict(malora_minus_lora=float(np.mean(each)))


def _sequences(found: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, float]]:
    runs = [Comparison.of(seed["comparison"]) for seed in found]
    ratios = {k: np.median([seed["passes"]["ratios"][k] for seed in found]) for k in found[0]["passes"]["ratios"]}
    times = ", ".join(f"{ratio:.2f} × for {k} experts" for k, ratio in ratios.items())
    told = (
        "A prompt of several domains takes one pass if each token has its own expert, and a pass of each expert if "
        f"a sequence has one. Time of these passes over that of the one (median over seeds): {times}."
    )
    if PASSES_OF_OWN in runs[0].right:
        told += f" Of `{PASSES_OF_OWN}` its own domain's answer is taken: the best that routing of sequences can do."
    head = "## A small base with routed experts against a large one (accuracy in percent)"
    return "\n\n".join([head, comparison.table(runs), told]), {}


def _pair(found: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, float]]:
    text = "## Two models, routed token by token (testbed:small and testbed:large)\n\n" + pair_report.table(found)
    at = {f"{name}_accuracy_at_20pct_share": router for name, router in dict(routed=TRAINED, random=RANDOM).items()}
    return text, {key: 100 * pair_report.accuracy_at(found, router, 0.2) for key, router in at.items()}
