"""What adapter libraries were reported to get wrong, tried on this project and on PEFT.

python -m experiments.adapter_conformance
"""

import pathlib
import tempfile

from absl import flags

from experiments.conformance.inputs import Inputs
from experiments.conformance.ours import Ours
from experiments.conformance.rows import ROWS
from experiments.conformance.side import Side, judge
from molora_jax import benchmarking, cli

_ROWS = flags.DEFINE_list("rows", [], "Numbers of the rows to run; all by default.")


def main() -> None:
    """Prints a scoreboard: right, wrong, or silent, which is wrong without a word."""
    bench = benchmarking.Bench("adapter_conformance")
    chosen = [row for row in ROWS if not _ROWS.value or str(row.number) in _ROWS.value]
    right: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        inputs = Inputs(pathlib.Path(folder))
        sides: list[Side] = [Ours(inputs), *peers(inputs)]
        for row in chosen:
            verdicts = {side.name: judge(row, inputs, side) for side in sides}
            print(f"{row.number:>2}  {row.input} → {row.behaviour}")
            for name, verdict in verdicts.items():
                print(f"      {name:5} {verdict.word:7} {verdict.what}", flush=True)
                right[name] = right.get(name, 0) + (verdict.word == "right")
            found = {name: dict(verdict=verdict.word, what=verdict.what) for name, verdict in verdicts.items()}
            bench.rows.append(dict(row=row.number, input=row.input, behaviour=row.behaviour, **found))
    bench.finish(dict(rows=len(chosen)) | {f"{name}_right": count for name, count in right.items()})


def peers(inputs: Inputs) -> list[Side]:
    """PEFT, if it is installed."""
    try:
        from experiments.conformance.peft_side import Peft
    except ImportError:
        print("peft: left out, it is not installed: pip install 'molora_jax[bench]'")
        return []
    return [Peft(inputs)]


if __name__ == "__main__":
    cli.run(main)
