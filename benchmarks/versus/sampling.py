"""Sampling: our `hf` engine on a pool of requests, and transformers' `generate` at one batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stalewise.models import pick_precision
from stalewise.models.loading import encode_prompts, load_model, load_tokenizer, stop_token_ids
from stalewise.rollout.factory import make_sampler
from stalewise.rollout.sampler import Request
from stalewise.rollout.token_sampling import rollout_seed
from stalewise.tasks import make_task

from .clock import peak, reset_peak, set_up, synchronised
from .ours import base_checkpoint
from .profiling import begin_profile, device_figures, keep_profile, traced
from .settings import Settings, our_config

ROWS_AT_ONCE = 256  # of the forward pass that scores what `generate` made


def pool_prompts(settings: Settings, tokenizer: Any) -> list[list[int]]:
    """Token ids of the prompts of the pool, each as often as a group has rollouts."""
    prompts = make_task(settings.task, seed=0).prompts(0, -(-settings.pool // settings.group_size))
    ids = encode_prompts(prompts, tokenizer)
    return [prompt for prompt in ids for _ in range(settings.group_size)][: settings.pool]


def ours(settings: Settings, work: Path) -> dict[str, Any]:
    """The pool in one call, log-probabilities included; the first call warms up and is timed apart."""
    set_up(settings.device, settings.threads)
    schedule = {"updates": settings.steady_updates or settings.updates}
    config = our_config(settings, work, "sampler", changes={"schedule": schedule})
    sampler = make_sampler(config)
    start = synchronised()
    sampler.load(base_checkpoint(work))
    loading = synchronised() - start
    prompts = pool_prompts(settings, sampler.tokenizer)
    seconds: list[float] = []
    tokens: list[int] = []
    requests: list[Request] = []
    for repeat in range(settings.sampler_repeats + 1):
        requests = [Request(ids, rollout_seed(repeat, row)) for row, ids in enumerate(prompts)]
        if repeat == 1:
            reset_peak()
        start = synchronised()
        responses = sampler.sample(requests)
        seconds.append(synchronised() - start)
        tokens.append(sum(len(response.token_ids) for response in responses))
        if any(len(response.logp) != len(response.token_ids) for response in responses):
            raise RuntimeError("a response lacks log-probabilities")
    memory = peak()
    profile = _profiled(sampler, requests, work) if torch.cuda.is_available() else {}
    sampler.close()
    return {
        "config": config.model_dump(mode="json"),
        "requests": len(prompts),
        "load_seconds": loading,
        "warmup_seconds": seconds[0],
        "repeat_seconds": seconds[1:],
        "repeat_tokens": tokens[1:],
        "seconds": sum(seconds[1:]),
        "tokens_per_second": sum(tokens[1:]) / sum(seconds[1:]),
        **memory,
        "profile": profile,
    }


def _profiled(sampler: Any, requests: list[Request], work: Path) -> dict[str, Any]:
    """What the device did in one more call; the one before it warms the profiler up."""
    profiler = begin_profile()
    sampler.sample(requests)
    synchronised()
    keep_profile(profiler)
    start = synchronised()
    sampler.sample(requests)
    seconds = synchronised() - start
    profiler.stop()
    return {"seconds": seconds, **device_figures(traced(profiler, work), seconds)}


class Generator:
    """transformers' `generate` on batches of the pool, sampling at temperature 1 from the whole distribution."""

    def __init__(self, settings: Settings, base: Path, place: torch.device) -> None:
        self.settings, self.place = settings, place
        self.tokenizer = load_tokenizer(str(base))
        self.model = load_model(str(base), device=place, dtype=pick_precision("auto", place))
        stops = stop_token_ids(self.model.config, self.model.generation_config, self.tokenizer)
        self.stops = torch.tensor(stops, device=place)
        self.prompts = pool_prompts(settings, self.tokenizer)

    def batch(self, first: int, size: int) -> dict[str, Tensor]:
        """Prompts `first` and after, padded on the left; the pool is gone round where it is too short."""
        chosen = [self.prompts[(first + row) % len(self.prompts)] for row in range(size)]
        width = max(map(len, chosen))
        ids = torch.tensor([[self.tokenizer.pad_token_id] * (width - len(p)) + p for p in chosen])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in chosen])
        return {"input_ids": ids.to(self.place), "attention_mask": mask.to(self.place)}

    def generate(self, batch: dict[str, Tensor], *, scores: bool = False) -> Any:
        return self.model.generate(
            **batch,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.settings.max_new_tokens,
            eos_token_id=self.stops.tolist(),
            pad_token_id=self.tokenizer.pad_token_id,
            return_dict_in_generate=True,
            output_scores=scores,
        )

    def kept(self, completions: Tensor) -> Tensor:
        """Which tokens count: up to and with the first that ends the response."""
        ended = torch.isin(completions, self.stops).int()
        return (ended.cumsum(dim=1) - ended) == 0

    @torch.no_grad()
    def run(self, batch: dict[str, Tensor], way: str) -> int:
        """One batch, its log-probabilities got in this way; how many tokens were kept."""
        width = batch["input_ids"].shape[1]
        output = self.generate(batch, scores=way == "output_scores")
        completions = output.sequences[:, width:]
        mask = self.kept(completions)
        if way == "output_scores":
            self.model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True).float().cpu()
        elif way == "forward pass":
            self.score(output.sequences, batch["attention_mask"], mask).cpu()
        completions.cpu()
        return int(mask.sum())

    def score(self, sequences: Tensor, attention: Tensor, mask: Tensor) -> Tensor:
        """Log-probabilities of the completions by one more forward pass, as TRL gets them."""
        width, count = attention.shape[1], mask.shape[1]
        found: list[Tensor] = []
        for first in range(0, len(sequences), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            full = torch.cat([attention[rows], mask[rows].long()], dim=1)
            positions = (full.cumsum(dim=1) - 1).clamp(min=0)
            logits = self.model(
                input_ids=sequences[rows], attention_mask=full, position_ids=positions, logits_to_keep=count + 1
            ).logits[:, :-1]
            picked = logits.gather(2, sequences[rows, width:].unsqueeze(2)).squeeze(2).float()
            found.append(picked - logits.float().logsumexp(dim=2))
        return torch.cat(found)


def generate(settings: Settings, work: Path, batch: int) -> dict[str, Any]:
    """`generate` at one batch size, without log-probabilities and with them, in both ways there are."""
    place = set_up(settings.device, settings.threads)
    generator = Generator(settings, base_checkpoint(work), place)
    torch.manual_seed(0)
    # The whole length: kernels are chosen, and memory found, for each length of the cache anew; and for the scoring.
    generator.run(generator.batch(0, batch), "forward pass")
    batches = max(1, settings.generate_rows // batch)
    found: dict[str, Any] = {"batch": batch, "batches": batches, "ways": {}}
    # The one that may run out of memory comes last.
    for way in ("none", "forward pass", "output_scores"):
        found["ways"][way] = _timed(generator, way, batch, batches)
    rates = {way: measured.get("tokens_per_second", 0.0) for way, measured in found["ways"].items()}
    with_logp = {way: rate for way, rate in rates.items() if way != "none"}
    best = max(with_logp, key=lambda way: with_logp[way])
    return {
        **found,
        "way": best,
        "tokens_per_second": with_logp[best] or None,
        "tokens_per_second_without_logp": rates["none"] or None,
    }


def _timed(generator: Generator, way: str, batch: int, batches: int) -> dict[str, Any]:
    seconds: list[float] = []
    tokens = 0
    reset_peak()
    try:
        for place in range(batches):
            inputs = generator.batch(place * batch, batch)
            start = synchronised()
            tokens += generator.run(inputs, way)
            seconds.append(synchronised() - start)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return {"error": str(error).splitlines()[0]}
    return {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / sum(seconds), **peak()}
