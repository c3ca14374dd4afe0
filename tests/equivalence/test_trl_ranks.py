"""TRL's trainer with our objectives on two ranks: the update is the one that our learner takes alone."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from tiny import tiny_record

PROMPTS, GROUP = 8, 4
OBJECTIVES = ("p3o", "m2po", "dapo")


def rank_main(rank: int, port: int, directory: Path) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    os.environ.update(place | {"LOCAL_RANK": str(rank), "TRL_EXPERIMENTAL_SILENCE": "1"})
    torch.set_num_threads(1)
    from transformers import TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig

    from stalewise.integrations.trl import StaleGRPOTrainer
    from stalewise.integrations.trl_store import StoredRollouts
    from stalewise.models import EMBEDDED
    from stalewise.models.loading import load_tokenizer

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_) -> None:
            assert model is not None
            self.found = {name.removeprefix("module."): value.grad.clone() for name, value in model.named_parameters()}

    for objective in OBJECTIVES:
        stored, gradients = StoredRollouts(directory / "made"), Gradients()
        settings = GRPOConfig(
            output_dir=str(directory / "trl"),
            max_steps=1,
            per_device_train_batch_size=PROMPTS * GROUP // 4,
            gradient_accumulation_steps=2,
            num_generations=GROUP,
            max_completion_length=8,
            max_grad_norm=0.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = StaleGRPOTrainer(
            model=str(EMBEDDED / "arithmetic"),
            args=settings,
            objective=objective,
            reward_funcs=stored.reward,
            rollout_func=stored.rollouts,
            train_dataset=stored.dataset,
            processing_class=load_tokenizer(str(EMBEDDED / "arithmetic")),
            callbacks=[gradients],
            store=directory / f"again-{objective}",
        )
        trainer.train()
        if rank == 0:
            logged = trainer.state.log_history[0]
            torch.save((logged["loss"], logged["stalewise/ess"], gradients.found), directory / f"{objective}.pt")
    torch.distributed.barrier()
    # Without taking the trainers apart: their reducers, without a group by then, were seen to wait for ever.
    os._exit(0)


@pytest.mark.nightly
def test_two_ranks_with_two_micro_batches_take_the_update_of_our_learner(tmp_path: Path) -> None:
    from policies import POLICY, moved
    from stalewise.api import generate
    from stalewise.config import make_config
    from stalewise.store import batch_directories, open_batch
    from stalewise.trainer.trainer import Trainer

    sizes = {"prompts": PROMPTS, "group_size": GROUP}
    once = {"kind": "staged", "updates": 1, "stages": 1}
    other = moved(POLICY, tmp_path / "other", by=0.2)
    generate(make_config(tiny_record(tmp_path, "made", model={"path": str(other)}, batch=sizes, schedule=once)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = start_processes(rank_main, args=(port, tmp_path), nprocs=2, join=False, start_method="spawn")
    assert ranks is not None
    deadline = time.monotonic() + 240
    while not ranks.join(timeout=5):  # raises what a rank raised
        if time.monotonic() > deadline:
            for pid in ranks.pids():
                os.kill(pid, signal.SIGKILL)
            pytest.fail("the ranks did not end")

    batch = open_batch(batch_directories(tmp_path / "made" / "rollouts")[0])
    for objective in OBJECTIVES:
        changes = {"objective": {"name": objective}, "optimizer": {"max_grad_norm": 1e9}, "batch": sizes}
        trainer = Trainer(make_config(tiny_record(tmp_path, "learner", **changes)), POLICY)
        metrics = trainer.update(batch.take(batch.column("rollout_id")))
        loss, ess, found = torch.load(tmp_path / f"{objective}.pt")
        assert loss == pytest.approx(metrics["loss"], abs=1e-5)
        assert ess == pytest.approx(metrics["ess"], rel=1e-5)
        for parameter, name in trainer.names.items():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-5)
        (again,) = map(open_batch, batch_directories(tmp_path / f"again-{objective}" / "rollouts"))
        assert sorted(map(bytes, responses(again))) == sorted(map(bytes, responses(batch)))


def responses(batch) -> list[list[int]]:
    return [list(rollout.response_ids) for rollout in batch.iter_rollouts()]
