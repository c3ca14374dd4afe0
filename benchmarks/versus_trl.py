"""stalewise against TRL 1.16 and transformers on one machine: learner, sampler, memory, idle time, time to accuracy.

    python benchmarks/versus_trl.py                                           # everything
    python benchmarks/versus_trl.py --parts learner,memory --deadline-s 420   # a part now, the others later
    python benchmarks/versus_trl.py --out FILE --table --plot SVG             # show what was measured, measure nothing

Without a GPU: the embedded policy of `arithmetic`. With one: SmolLM2-135M-Instruct (`--model` takes any Hugging Face
directory) on `arithmetic-chat`. Every measurement is a process of its own, one after the other, and is merged into the
JSON of `--out` when it is done; what is there already is not measured again, so a command that was cut goes on.
docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

from pathlib import Path

from versus.main import main

if __name__ == "__main__":
    main(Path(__file__).resolve(), __doc__)
