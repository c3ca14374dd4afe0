"""Time to accuracy on GSM8K or other data: stalewise against TRL 1.16 with vLLM in the same process, on one GPU.

    python benchmarks/gsm8k.py convert FILE.gguf DIR
    python benchmarks/gsm8k.py run --arm mu_grpo --seed 0 --lr 2e-6 --model DIR --train T.jsonl --test E.jsonl --timed
    python benchmarks/gsm8k.py plan --jobs jobs.txt --arms mu_grpo,p3o --seeds 101,102 --lrs 1e-6,2e-6,4e-6
    python benchmarks/gsm8k.py next --list jobs.txt --seconds 560 --parallel 3 --model DIR …   # as many as fit
    python benchmarks/gsm8k.py collect jobs/*.json           # benchmarks/results/gsm8k-h200.json, a table, a picture

    # A 1.5B model on MATH, tested on MATH-500 and, by its first and last policy alone, on GSM8K. TRL pads all prompts
    # of a generation to the longest one, so the longest 1% of the problems are left out for all arms. One problem of
    # the training set is also in MATH-500.
    jq -c 'select((.problem | length) <= 1000 and .id != "math-train-1709")' math_train.jsonl > math_train_1000.jsonl
    python benchmarks/gsm8k.py run --arm mu_grpo --seed 0 --lr 2e-6 --timed --model DIR --train math_train_1000.jsonl
        --test math500_test.jsonl --also-test gsm8k_test.jsonl --test-prompts 500 --max-new-tokens 768 --updates 64
        --evaluate-every 16 --trl-batch 8 --set learner.tokens_per_micro_batch=8192 --out math-jobs
    python benchmarks/gsm8k.py collect math-jobs/*.json --out benchmarks/results/math-h200.json

Arms: `mu_grpo` and `p3o` (stages of 16 updates; `mu_grpo_64`, `mu_grpo_128` and `p3o_64`: of 64 and 128), `auto`
(recipe = "auto"), `synchronous` (GRPO, µ = 4), `grpo_tight` (tight clip at the stages of mu_grpo), `random_reward`
(mu_grpo, rewards by a hash of the rollout), `mu_grpo_x2` and `auto_x2` (twice the updates at the same learning rate,
which still take a third of TRL's time), `trl_vllm`, `trl_generate` (both µ = 4). All: the same prompts in the same
order, the same verifier, T = 1, AdamW, warm-up and cosine, and, unless said, 16 prompts × 8 rollouts an update, 400 new
tokens and 128 updates; no KL, gradients to norm 1, bfloat16 passes and float32 weights. Our arms, but for P3O, make no
passes over groups of equal rewards, whose gradient is 0 (`batch.without_variance = "skip"`). Where trl or vllm is
missing, its arms are left out and their files say so.

What the clock counts: wall-clock from the beginning of the first generation to the end of each update. In it: sampling,
scoring by the verifier, learning, switches between the two, weights on their way to vLLM, checkpoints that a later
generation is made from, and whatever is compiled after the first update. Not in it, on either side: start of the
process, loading of models, start of vLLM with its compilation, start of the verifier's processes, our first evaluation
(which warms our sampler as vLLM's start warms it), what our first turn to the learner takes longer than the longest
later one, what the first update takes longer than the median one (compilation), evaluations, and weights that are
written for an evaluation alone. Start-up stands apart as `startup_seconds`. Timed jobs (`--timed`) run alone on the
device and begin again where they were cut; the others may run several at once, go on where they were cut, and have no
clock. `compiled_before` says whether an earlier process had left compiled kernels.

Evaluation: all test questions, 4 samples at T = 1 every 32 updates and at the end, greedy once at the end, by our
sampler with the same random numbers for every arm. A second test set (`--also-test`) is answered greedily by the policy
that all start from, once for all arms, and by each arm's last one. Seeds from 100 on are for tuning and are never
judged; final accuracy decides there, so `--evaluate-every 128` saves time (not for `auto`, whose guard reads
evaluations).

`events.jsonl` in the work directory of one of TRL's jobs has its seconds by event up to each update, as sums, also
where the job was cut.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is no part of the package

from benchmarks.gsm8k_bench import jobs
from benchmarks.gsm8k_bench.settings import ARMS, FILES, Settings, tuned_as

from stalewise.errors import StalewiseError

HERE = Path(__file__).resolve().parent
SCRIPT = Path(__file__).resolve()


def parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = whole.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("convert", help="a GGUF file as a Hugging Face directory")
    one.add_argument("source", type=Path)
    one.add_argument("directory", type=Path)
    one = verbs.add_parser("run", help="one job")
    one.add_argument("--arm", choices=ARMS, required=True)
    one.add_argument("--seed", type=int, required=True)
    one.add_argument(
        "--lr", type=_rate, required=True, help="a number; tuned: the arm's best on the tuning seeds in --out"
    )
    one.add_argument("--timed", action="store_true", help="it runs alone on the device")
    _add_common(one)
    one = verbs.add_parser("plan", help="write a list of jobs")
    one.add_argument("--jobs", type=Path, required=True)
    one.add_argument("--arms", default=",".join(ARMS))
    one.add_argument("--seeds", default="0")
    one.add_argument("--lrs", required=True)
    one.add_argument("--more", default="", help="further arguments of each job, as in '--timed'")
    one.add_argument("--append", action="store_true")
    one = verbs.add_parser("next", help="work off a list until the time is out")
    one.add_argument("--list", type=Path, required=True, action="append", help="several, where it is said again")
    one.add_argument("--seconds", type=float, default=560.0)
    one.add_argument("--parallel", type=int, default=1, help="jobs at once, of those that are not timed")
    one.add_argument("--least", type=float, default=0.0, help="begin no job with fewer seconds left")
    _add_common(one)
    one = verbs.add_parser("collect", help="results, table and picture from job files")
    one.add_argument("files", type=Path, nargs="+")
    one.add_argument("--out", type=Path, default=HERE / "results" / "gsm8k-h200.json")
    one.add_argument("--plot", type=Path, help="SVG; beside --out unless said")
    one = verbs.add_parser("worker")
    one.add_argument("spec", type=Path)
    return whole


def _add_common(one: argparse.ArgumentParser) -> None:
    one.add_argument("--out", type=Path, default=Path("jobs"), help="where job files go")
    one.add_argument("--work", type=Path, default=Path("gsm8k-work"), help="run directories, gone when a job is done")
    one.add_argument("--vllm", default=os.environ.get("GSM8K_VLLM_PATH", ""), help="PYTHONPATH of vLLM's process")
    one.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of our config")
    one.add_argument("--smoke", action="store_true", help="seconds on a CPU; its figures mean nothing")
    for field in dataclasses.fields(Settings):
        option = f"--{field.name.replace('_', '-')}"
        if isinstance(field.default, bool):
            one.add_argument(option, action=argparse.BooleanOptionalAction, default=None)
        else:
            one.add_argument(option, type=type(field.default), default=None)


def _rate(text: str) -> float | None:
    return None if text == "tuned" else float(text)


class NotTunedError(SystemExit):
    """An arm has no tuned rate yet."""


def tuned_rate(arm: str, settings: Settings, out: Path) -> float:
    """The learning rate of an arm that is best on the tuning seeds, among the jobs of this size in `out`.

    It must lie inside the grid: the best of one or two rates, or one at an edge, may not be the arm's best.
    """
    from benchmarks.gsm8k_bench.figures import TUNING_SEEDS, done_jobs, size_of, tuned

    wanted = size_of({"settings": settings.record(), "seed": TUNING_SEEDS})
    found = tuned([job for job in done_jobs(map(jobs.read, sorted(out.glob("*.json")))) if size_of(job) == wanted])
    arm = tuned_as(arm)
    if arm not in found:
        raise NotTunedError(
            f"--lr tuned: no job in {out} is of {arm}, a tuning seed and this size: tune it, or say a rate"
        )
    if not found[arm]["inside"]:
        tried = ", ".join(found[arm]["accuracy"])
        raise NotTunedError(
            f"--lr tuned: {found[arm]['best']:g} is best for {arm} among {tried}, and at the edge: tune at rates on "
            "both sides of it, or say a rate"
        )
    return found[arm]["best"]


def job_of(arguments: argparse.Namespace) -> jobs.Job:
    """What the arguments of `run` ask for."""
    work, out = arguments.work.resolve(), arguments.out.resolve()
    usual: dict[str, Any] = jobs.smoke_settings(work) if arguments.smoke else {}
    names = [field.name for field in dataclasses.fields(Settings)]
    said = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    for name in FILES:
        if said.get(name) and Path(said[name]).exists():
            said[name] = str(Path(said[name]).resolve())
    settings = Settings(**{**usual, **said})
    return jobs.Job(
        arm=arguments.arm,
        seed=arguments.seed,
        rate=tuned_rate(arguments.arm, settings, out) if arguments.lr is None else arguments.lr,
        settings=settings,
        out=out,
        work=work,
        timed=arguments.timed,
        vllm=arguments.vllm,
        changes=dict(map(_override, arguments.set)),
        base=Settings(**usual),
    )


def _override(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def common_of(arguments: list[str]) -> list[str]:
    """The arguments of `next` that are those of `run`, too."""
    kept: list[str] = []
    skip = False
    for argument in arguments[1:]:
        name = argument.partition("=")[0]
        if skip or name in ("--list", "--seconds", "--parallel", "--least"):
            skip = not skip and "=" not in argument
            continue
        kept.append(argument)
    return kept


def collect(files: list[Path], out: Path, plot: Path) -> None:
    from benchmarks.gsm8k_bench.figures import headline, size_of
    from benchmarks.gsm8k_bench.picture import draw, table

    found = [record for path in sorted(files) if (record := jobs.read(path)) and record.get("format") == jobs.FORMAT]
    if not found:
        raise SystemExit("none of these files is a job's")
    sizes = {json.dumps(size_of(record), sort_keys=True): size_of(record) for record in found}
    main = max(sizes, key=lambda size: sum(json.dumps(size_of(job), sort_keys=True) == size for job in found))
    inside = [job for job in found if json.dumps(size_of(job), sort_keys=True) == main]
    head = headline(inside)
    if len(inside) < len(found):
        head["notes"].append(f"{len(found) - len(inside)} jobs of other sizes are kept and not in these figures")
    by_update = ("journal", "last_words", "metrics", "at")  # they stay in the jobs' own files
    kept = [{key: value for key, value in job.items() if key not in by_update} for job in found]
    shared = sizes[main]
    record = {"format": jobs.FORMAT, "settings": shared, **head, "jobs": kept}
    jobs.write(out, record)
    print(table(head, shared))
    if draw(inside, head, plot, settings=shared):
        print(f"{out}, {plot}")
    else:
        print(f"{out}; no timed job is there to draw")


def work_off(arguments: argparse.Namespace, common: list[str]) -> int:
    """Do what is left of the lists; 3 where something is left then. What has no tuned rate is passed over."""
    listed: list[tuple[list[str], jobs.Job]] = []
    passed_over = 0
    for line in (line for place in arguments.list for line in jobs.read_list(place)):
        try:
            listed.append((line, job_of(parser().parse_args(["run", *common, *line]))))
        except NotTunedError as error:
            passed_over += 1
            print(f"{' '.join(line)}: passed over: {error}")
    todo = [(line, job) for line, job in listed if jobs.is_wanted(job)]
    print(f"{len(listed) + passed_over} jobs, {len(listed) - len(todo)} done before", flush=True)
    if (parallel := arguments.parallel) > 1 and todo:
        parallel = min(parallel, jobs.jobs_that_fit(Path(todo[0][1].settings.model), todo[0][1].work))
        if parallel < arguments.parallel:
            print(f"{parallel} at once: for more the disk has no room", flush=True)
    queue = jobs.Queue(SCRIPT, common, seconds=arguments.seconds, parallel=parallel, least=arguments.least)
    in_time = queue.work([(line, job.timed) for line, job in todo])
    left = [job.name for _, job in todo if not jobs.is_settled(job)]
    return 0 if in_time and not left and not passed_over else 3


def main(given: list[str]) -> int:
    arguments = parser().parse_args(given)
    if arguments.verb == "convert":
        from benchmarks.gsm8k_bench.convert import convert

        try:
            print(json.dumps(convert(arguments.source, arguments.directory)))
        except StalewiseError as error:
            raise SystemExit(f"error: {error}") from None
    elif arguments.verb == "run":
        return 1 if jobs.run_job(job_of(arguments), SCRIPT).get("error") else 0
    elif arguments.verb == "plan":
        seeds, rates = map(int, arguments.seeds.split(",")), map(float, arguments.lrs.split(","))
        lines = jobs.plan(arguments.arms.split(","), list(seeds), list(rates), arguments.more)
        with open(arguments.jobs, "a" if arguments.append else "w") as file:
            file.writelines(f"{line}\n" for line in lines)
        print(f"{arguments.jobs}: {len(lines)} jobs")
    elif arguments.verb == "next":
        return work_off(arguments, common_of(given))
    elif arguments.verb == "collect":
        collect(arguments.files, arguments.out, arguments.plot or arguments.out.with_suffix(".svg"))
    else:
        jobs.work_on(arguments.spec)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
