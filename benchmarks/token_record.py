"""What it costs to write down each token's log-probability: the updates of a finished run, with and without.

    python benchmarks/token_record.py runs/demo/mu_grpo

Both learners take the same updates on the last generation batch in turns; processor time is compared, so that other
load on the machine counts little. One JSON object is printed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from stalewise.config.run_directory import read_config
from stalewise.store import TokenLog, batch_directories, open_batch, rollouts_of_updates
from stalewise.store.checkpoints import checkpoint_directory, versions
from stalewise.trainer.trainer import Trainer


def measure(run: Path, repeats: int) -> dict[str, float]:
    config = read_config(run)
    batch = open_batch(batch_directories(run / "rollouts")[-1])
    checkpoint = checkpoint_directory(run, versions(run)[-1])
    learners: dict[bool, Trainer] = {}
    for records in (True, False):
        trainer = config.learner.model_copy(update={"record_tokens": records})
        learners[records] = Trainer(config.model_copy(update={"learner": trainer}), checkpoint)
        learners[records].version = batch.manifest.version
    seconds = {True: 0.0, False: 0.0}
    dealt = rollouts_of_updates(batch, config.batch.prompts)
    with tempfile.TemporaryDirectory() as directory:
        log = TokenLog(directory)
        for update in range(repeats * len(dealt)):
            rows = batch.take(dealt[update % len(dealt)])
            for records in (True, False) if update % 2 else (False, True):
                start = time.process_time()
                pending = learners[records].enqueue(rows)
                pending.metrics()
                log.add(update, pending.tokens())
                seconds[records] += time.process_time() - start
        start = time.process_time()
        path = log.commit(repeats * len(dealt))
        seconds[True] += time.process_time() - start
        size = path.stat().st_size if path else 0
    tokens = repeats * sum(len(batch.take(ids).response_ids) for ids in dealt)
    return {
        "updates": repeats * len(dealt),
        "tokens": tokens,
        "seconds_without": seconds[False],
        "seconds_with": seconds[True],
        "share": seconds[True] / seconds[False] - 1,
        "bytes_per_token": size / tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(arguments.run, arguments.repeats)))


if __name__ == "__main__":
    main()
