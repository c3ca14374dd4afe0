"""benchmarks/learner.py: its parts, floors, kernel groups and results by hand; one part measured on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # no part of the package

from benchmarks.learner_bench import figures  # noqa: E402
from versus.figures import ModelShape  # noqa: E402


def test_a_pattern_stands_for_parts_once_each_in_order() -> None:
    names = [part.name for part in figures.parts_of("7b/{full,lora}/recompute/graphs,7b/full/*/graphs")]
    assert names == ["7b/full/recompute/graphs", "7b/lora/recompute/graphs", "7b/full/plain/graphs"]


@pytest.mark.parametrize("text", ["9b/full/plain/graphs", "7b/full/plain", "7b/full/plain/fast"])
def test_an_unknown_part_is_refused(text: str) -> None:
    with pytest.raises(SystemExit, match="is no"):
        figures.parts_of(text)


def test_the_floor_counts_products_recomputation_and_bytes() -> None:
    record = {
        "matmul_flops_per_second": 100.0,
        "copy_bytes_per_second": 1000.0,
        "flops": 900.0,
        "body_forward_flops": 200.0,
        "output_forward_flops": 100.0,
        "recomputes": True,
        "trained_parameters": 10,
        "micro_batches": 2,
    }
    # 900/100; a forward pass again: (200 + 100)/100; 50 bytes · 10/1000; 12 bytes · 10 · 2/1000.
    expected = {"products": 9.0, "recompute": 3.0, "step": 0.5, "gradients": 0.24}
    assert figures.floor_seconds(record) == pytest.approx(expected)
    assert figures.floor_seconds(record | {"recomputes": False})["recompute"] == pytest.approx(1.0)


def test_frozen_weights_need_no_gradients() -> None:
    # As in test_versus.py, forward: 3 + 2 tokens, body 2 · 10 · 5, output 2 · 4 · 7 · 2, attention 2 · 2 · 8 · 25.
    shape = ModelShape(body_parameters=10, layers=2, attention_width=8, hidden=4, vocabulary=7)
    trained = figures.operations_of(shape, [[(3, [2])], [(3, [2])]], is_frozen=False)
    frozen = figures.operations_of(shape, [[(3, [2])], [(3, [2])]], is_frozen=True)
    assert trained["body_forward_flops"] == frozen["body_forward_flops"] == 100 + 800
    assert trained["output_forward_flops"] == frozen["output_forward_flops"] == 112
    assert (trained["body_flops"], trained["output_flops"]) == (3 * 900, 3 * 112)
    assert (frozen["body_flops"], frozen["output_flops"]) == (2 * 100 + 3 * 800, 2 * 112)
    assert frozen["flops"] == frozen["body_flops"] + frozen["output_flops"]


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "matrix products"),
        ("_statistics", "logits"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::silu…", "elementwise"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<…FusedAdamMathFunctor",
            "optimizer and lists",
        ),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", "compiled"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("something else", "other"),
    ],
)
def test_kernels_are_grouped_by_name(kernel: str, group: str) -> None:
    assert figures.group_of(kernel) == group


def test_groups_add_up_and_the_largest_is_first() -> None:
    found = figures.by_group([(0, 1000, "nvjet_a"), (1000, 4000, "flash_b"), (4000, 5000, "nvjet_c")])
    assert found == {"attention": 3.0, "matrix products": 2.0}
    assert next(iter(found)) == "attention"


def _run(tokens: float, mfu: float = 0.5) -> dict[str, Any]:
    return {"tokens_per_second": tokens, "mfu": mfu, "peak_bytes": 1, "estimate_ratio": 1.0}


def test_auto_is_compared_with_the_fastest_mode_and_failures_are_listed() -> None:
    runs = {
        "7b/full/recompute/launches": _run(30.0, mfu=0.22),  # on a faster machine
        "7b/full/recompute/graphs": _run(20.0, mfu=0.44),
        "7b/full/recompute/auto": _run(15.0, mfu=0.33),
        "1.5b/full/plain/graphs": _run(20.0, mfu=0.54),
        "1.5b/full/plain/auto": _run(25.0, mfu=0.56),
        "7b/full/recompute/both": {"error": "out\nof memory"},
    }
    head = figures.headline(runs)
    best = head["fastest"]["7b/full/recompute"]
    assert (best["mode"], best["auto_share"], best["goal_met"]) == ("graphs", 0.75, False)  # 0.44 < 0.45
    best = head["fastest"]["1.5b/full/plain"]
    assert (best["mode"], best["auto_share"], best["goal_met"]) == ("auto", 1.0, True)  # 0.56 > 0.55
    assert head["failed"] == {"7b/full/recompute/both": "of memory"}

    of_two_sittings = {
        "0.5b/full/plain/both": {**_run(20.0, mfu=0.6), "sitting": 0},
        "0.5b/full/plain/graphs": {**_run(20.0, mfu=0.4), "sitting": 1},
        "0.5b/full/plain/auto": {**_run(20.0, mfu=0.5), "sitting": 1},
        "1.5b/full/plain/graphs": {**_run(20.0, mfu=0.4), "sitting": 0},
        "1.5b/full/plain/auto": {**_run(20.0, mfu=0.5), "sitting": 1},
    }
    found = figures.fastest(of_two_sittings)
    assert (found["0.5b/full/plain"]["mode"], found["0.5b/full/plain"]["auto_share"]) == ("both", 1.0)
    assert "auto_share" not in found["1.5b/full/plain"]  # nothing was measured beside it


def test_a_part_is_measured_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.learner_bench import work

    monkeypatch.setattr(work.trainer_module, "load_policy", work.random_policy)
    settings = work.Settings(
        device="cpu",
        prompt_tokens=8,
        max_new_tokens=8,
        fewest_tokens=4,
        warmup=1,
        distinct=1,
        timed=1,
    )
    rates = {"matmul_flops_per_second": 1e9, "copy_bytes_per_second": 1e9}
    found = work.measure(settings, figures.Part("tiny", "full", "recompute", "launches"), tmp_path, rates)
    rows = work.rollouts(settings, "tiny", 0)
    assert found["tokens"] == len(rows.response_ids) + 16 * 8
    assert found["tokens_through_the_model"] == len(rows.response_ids) - 16 + 2 * 8  # prompts once, no last tokens
    assert found["flops"] == pytest.approx(found["body_flops"] + 6 * 64 * 512 * len(rows.response_ids))
    assert found["mfu"] == pytest.approx(found["flops"] / found["seconds"] / 1e9)
    assert found["estimate_bytes"] > 4 * 4 * found["trained_parameters"]  # weights, gradients, two moments
    assert found["config"]["learner"]["gradient_checkpointing"] is True


def test_a_stage_is_measured_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.learner_bench import work

    monkeypatch.setattr(work.trainer_module, "load_policy", work.random_policy)
    monkeypatch.setattr(work.embedded, "load_model", work.random_model)
    settings = work.Settings(device="cpu", prompt_tokens=8, max_new_tokens=4, fewest_tokens=2, stage_updates=2)
    rates = {"matmul_flops_per_second": 1e9, "copy_bytes_per_second": 1e9}
    found = work.measure_stage(settings, figures.Part("tiny", "stage", "plain", "auto"), tmp_path, rates)
    assert list(found["phases"]) == [
        *("load the sampler", "generate", "load the trainer", "learn", "generate again", "learn again"),
    ]
    assert 32 <= found["tokens_generated"] <= 32 * 4 and found["offloads"] is False
    assert found["last_metrics"]["rollouts"] == 16 and found["last_metrics"]["log_ratio_max_abs"] < 1e-3


def test_a_stage_in_which_trainer_and_sampler_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.learner_bench import work

    monkeypatch.setattr(work.trainer_module, "load_policy", work.random_policy)
    monkeypatch.setattr(work.embedded, "load_model", work.random_model)
    monkeypatch.setattr(work, "offloads", lambda config, source: True)
    slept, sleep = list[tuple[bool, bool]](), work.embedded.HFSampler.sleep

    def watched_sleep(sampler: Any, *, weights: bool = False, drop: bool = False) -> None:
        slept.append((weights, drop))
        sleep(sampler, weights=weights, drop=drop)

    monkeypatch.setattr(work.embedded.HFSampler, "sleep", watched_sleep)
    settings = work.Settings(device="cpu", prompt_tokens=8, max_new_tokens=4, fewest_tokens=2, stage_updates=2)
    rates = {"matmul_flops_per_second": 1e9, "copy_bytes_per_second": 1e9}
    found = work.measure_stage(settings, figures.Part("tiny", "stage", "plain", "auto"), tmp_path, rates)
    assert slept == [(True, True), (True, True)]
    assert list(found["phases"]) == [
        *("load the sampler", "generate", "the sampler leaves", "load the trainer", "learn"),
        *("the policy's copy", "to host memory", "the sampler takes the policy"),
        *("generate again", "the sampler leaves again"),
        *("back to the device", "record graphs again", "learn again"),
    ]
    assert found["offloads"] is True and found["last_metrics"]["log_ratio_max_abs"] < 1e-3
