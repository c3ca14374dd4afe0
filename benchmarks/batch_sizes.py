"""What staging saves by the size of an update: the three runs of the demo at other batch sizes, one thread.

    python benchmarks/batch_sizes.py

A line of JSON for each size: seconds of generating, learning and switching, and held-out accuracy.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from stalewise.api import run
from stalewise.cli import demo

SIZES = ((32, 128), (16, 192), (8, 256), (4, 384))  # prompts per update, updates


def main() -> None:
    with tempfile.TemporaryDirectory() as runs:
        demo.warm_up()
        for prompts, updates in SIZES:
            figures: dict[str, Any] = {"prompts": prompts, "group_size": 8, "updates": updates}
            for name in demo.RUNS:
                config = demo.demo_config(name, Path(runs) / str(prompts), prompts=prompts, updates=updates)
                summary = demo.summary_of(run(config))
                figures[name] = {key: round(summary[key], 3) for key in ("seconds", "accuracy")}
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
