"""The embedded engine: transformers' forward pass with a key-value cache, decoded in large batches.

On a GPU responses are decoded in slots (`slots.py`), elsewhere with a cache that grows (`growing.py`). Every response
is drawn with its own random numbers, so neither the batch nor the way of decoding decides what it says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from stalewise.errors import ModelError
from stalewise.models.compilation import compile_pieces
from stalewise.models.fused_ops import fuse_norms, fused_rotation
from stalewise.models.kernels import can_compile, get_ready
from stalewise.models.loading import context_length, load_model, load_tokenizer, stop_token_ids
from stalewise.rollout.engines.dynamic_decode import decode_growing
from stalewise.rollout.engines.quantize import RoundableWeights
from stalewise.rollout.engines.slot_cache import RequestQueue
from stalewise.rollout.engines.slot_decode import FinishedResponses, SlotDecoder, slots_problem
from stalewise.rollout.sampler import Request, Response
from stalewise.types import FinishReason, SamplerSettings

log = logging.getLogger(__name__)
# Room for a prompt is a multiple of this, so that places made for one pool of prompts mostly fit the next.
ROOM_STEP = 32
POOL = 32_768
SLEEP_SHARE = 0.1  # slots that take more of a GPU's memory than this make way for the learner


def tensor_names(weights: Path) -> frozenset[str]:
    """Names of the tensors in a safetensors file; only its header is read. One that is damaged is a ModelError."""
    try:
        with safe_open(weights, framework="pt") as file:
            return frozenset(file.keys())
    except SafetensorError as error:
        raise ModelError(f"{weights} cannot be read ({error}): copy it again") from error


class HFSampler:
    """Samples from a Hugging Face model in this process."""

    def __init__(
        self,
        settings: SamplerSettings,
        *,
        max_new_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        on_tokens: Callable[[int], object] = lambda count: None,
        slots: bool | None = None,
        compiling_pays: Callable[[Any], bool] = lambda model: False,
    ) -> None:
        """`on_tokens` is told the number of tokens after every few steps; `slots`: None is on GPUs, where they fit.

        `compiling_pays` says whether parts of a model on a GPU are to be compiled.
        """
        self.settings = settings
        self.max_new_tokens = max_new_tokens
        self.on_tokens = on_tokens
        self._compiling_pays = compiling_pays
        # A GPU is at its best with a large pool; on a CPU what is decoded together must not depend on what was there.
        self.preferred_batch_size = POOL if device.type == "cuda" else 1
        self._device = device
        self._dtype = dtype
        if device.type == "cuda":
            get_ready()
        self._model: Any = None
        self._weights: RoundableWeights | None = None
        self._loaded: tuple[object, ...] | None = None  # which file the weights are of; None: none, or several
        self._replaceable: frozenset[str] = frozenset()  # names of the tensors that a later checkpoint must have
        self._tokenizer: Any = None
        self._stop_ids = torch.empty(0, dtype=torch.long, device=device)
        self._stops: frozenset[int] = frozenset()
        self._slots_wanted = device.type == "cuda" if slots is None else slots
        self.slots_problem = "not loaded"  # empty: responses are decoded in slots
        self._decoder: SlotDecoder | None = None
        self._ways: dict[str, Any] = {}  # of drawing and of rotating in slots

    def load(self, checkpoint: Path) -> None:
        """Sample from this checkpoint. The first loads a model; later ones only replace its weights."""
        weights = checkpoint / "model.safetensors"
        if self._loaded is not None and self._loaded == _stamp(weights):
            return
        names = tensor_names(weights) if weights.is_file() else frozenset()
        if self._model is None or not names or names != self._replaceable:
            self.close()  # two models at once may not fit
            self._model = load_model(str(checkpoint), device=self._device, dtype=self._dtype)
            self._tokenizer = load_tokenizer(str(checkpoint))
            stop_ids = stop_token_ids(self._model.config, self._model.generation_config, self._tokenizer)
            self._stop_ids = torch.tensor(stop_ids, device=self._device)
            self._stops = frozenset(stop_ids)  # for the reader: its thread must leave the device alone
            # Some architectures are stored under other names than they have in memory: those are loaded anew each time.
            self._replaceable = names if names <= self._model.state_dict().keys() else frozenset()
            compiling = self._device.type == "cuda" and self._compiling_pays(self._model)
            if self._device.type == "cuda" and not compiling:
                fuse_norms(self._model)
            self._ways = _ways(self._model)
            self.slots_problem = slots_problem(self._model, **self._ways) if self._slots_wanted else "not wanted"
            if self._slots_wanted and self.slots_problem:
                log.warning("responses are decoded without slots, which is slower: %s", self.slots_problem)
            if compiling and not self.slots_problem:
                compile_pieces(self._model)
        else:
            self._replace(weights)
        self._weights, self._loaded = RoundableWeights(self._model), _stamp(weights)

    @torch.no_grad()
    def _replace(self, weights: Path) -> None:
        """Take other weights over, one by one and past the host; the file has every name that a whole one had."""
        self._loaded = None
        state: dict[str, torch.Tensor] = self._model.state_dict()
        with safe_open(weights, framework="pt", device=str(self._model.device)) as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in self._replaceable}
            if wrong := sorted(name for name in shapes if shapes[name] != tuple(state[name].shape)):
                raise ModelError(f"{weights} is for another model: {wrong[0]} has shape {list(shapes[wrong[0]])}")
            for name in self._replaceable:
                state[name].copy_(file.get_tensor(name))

    def close(self) -> None:
        """Let go of the model and of the memory for its cache."""
        self._model, self._decoder, self._weights, self._loaded = None, None, None, None
        self._ways = {}  # which hold the model

    def sleep(self) -> None:
        """Give the memory of the slots back until the next pool, where the learner may want it."""
        if self._decoder is not None and self._device.type == "cuda":
            total = torch.cuda.mem_get_info(self._device)[1]
            if self._decoder.cache.nbytes > SLEEP_SHARE * total:
                self._decoder = None
                torch.cuda.empty_cache()

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the loaded policy."""
        return self._tokenizer

    def check_lengths(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that leave no room for a response."""
        limit = context_length(self._model.config)
        longest = max(map(len, prompt_ids))
        if limit is not None and longest + self.max_new_tokens > limit:
            raise ModelError(
                f"the longest prompt has {longest} tokens; with sampler.max_new_tokens = {self.max_new_tokens} that is "
                f"over the model's context of {limit}: shorten prompts or lower max_new_tokens"
            )

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests."""
        settings = settings or self.settings
        assert self._weights is not None, "load comes first"
        self.check_lengths([request.prompt_ids for request in requests])
        self._weights.use(settings.weights)
        responses: list[Response | None] = [None] * len(requests)
        # One thread turns tokens into text while the device goes on decoding.
        with ThreadPoolExecutor(max_workers=1) as reader:
            read = [reader.submit(self._responses, ended) for ended in self._decode(requests, settings)]
            for finished in read:
                for index, response in finished.result():
                    responses[index] = response
        made = [response for response in responses if response is not None]
        assert len(made) == len(requests), "a response was lost, and others would go to the wrong prompts"
        return made

    def _decode(self, requests: Sequence[Request], settings: SamplerSettings) -> Iterator[FinishedResponses]:
        if not self.slots_problem:
            waiting = RequestQueue(requests)
            decoder = self._slot_decoder(waiting, settings)
            yield from decoder.decode(waiting, self.on_tokens)
            return
        # Longest first, ties in order: rows of one length lie together and the padding is small.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt_ids))
        decoded = decode_growing(
            self._model,
            [requests[i] for i in order],
            settings,
            new_tokens=self.max_new_tokens,
            stop_ids=self._stop_ids,
            pad_id=self._tokenizer.pad_token_id,
            on_tokens=self.on_tokens,
        )
        yield FinishedResponses(np.array(order), *decoded)

    def _slot_decoder(self, waiting: RequestQueue, settings: SamplerSettings) -> SlotDecoder:
        """Slots with room enough: those of the last time where they fit, since making them costs a second."""
        requests, prompts, longest = len(waiting.seed_Q), len(waiting.prompts), int(waiting.prefix_P.max())
        decoder = self._decoder
        if (
            decoder is None
            or decoder.prompt_room < longest
            or decoder.new_tokens != self.max_new_tokens
            or _shape(decoder.settings) != _shape(settings)
            or decoder.slots < min(requests, decoder.most_slots)
            or decoder.places < min(prompts, decoder.slots)
        ):
            if decoder is not None:  # pools that take turns, for training and for evaluating, are to fit both
                requests, prompts = max(requests, decoder.slots), max(prompts, decoder.places)
                longest = max(longest, decoder.prompt_room)
            self._decoder = decoder = None  # its memory is needed for the next, and counted as free there
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._decoder = decoder = SlotDecoder(
                self._model,
                requests=requests,
                prompts=prompts,
                prompt_room=-(-longest // ROOM_STEP) * ROOM_STEP,
                new_tokens=self.max_new_tokens,
                settings=settings,
                stop_ids=self._stop_ids,
                **self._ways,
            )
        return decoder

    def _responses(self, ended: FinishedResponses) -> list[tuple[int, Response]]:
        ids = [row[:length].tolist() for row, length in zip(ended.ids, ended.lengths, strict=True)]
        texts = texts_of(ids, self._tokenizer)
        return [
            (
                int(index),
                Response(
                    token_ids=tuple(tokens),
                    logp=tuple(logp[: len(tokens)].tolist()),
                    text=text,
                    finish_reason=FinishReason.STOP if tokens[-1] in self._stops else FinishReason.LENGTH,
                ),
            )
            for index, tokens, logp, text in zip(ended.requests, ids, ended.logp, texts, strict=True)
        ]


def _ways(model: Any) -> dict[str, Any]:
    """How slots draw and rotate: by kernels of our own where they can be made."""
    if model.device.type != "cuda" or not can_compile():
        return {}
    from stalewise.models.kernels.sample_token import draw_on_device  # Triton comes with torch for GPUs alone

    return {"draw": draw_on_device, "while_capturing": partial(fused_rotation, model)}


def _stamp(file: Path) -> tuple[object, ...] | None:
    """What tells a file from all others, later ones of the same name included; None where it is not there."""
    if not file.is_file():
        return None
    found = file.stat()
    return str(file), found.st_ino, found.st_size, found.st_mtime_ns


def texts_of(ids: list[list[int]], tokenizer: Any) -> list[str]:
    """What `batch_decode` gives, by the tokenizer's own library where it can: on all cores, and Python goes on."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or tokenizer.clean_up_tokenization_spaces:
        return tokenizer.batch_decode(ids, skip_special_tokens=True)
    return fast.decode_batch(ids, skip_special_tokens=True)


def _shape(settings: SamplerSettings) -> tuple[float, ...]:
    """What of the settings a decoding step depends on."""
    return settings.temperature, settings.top_p, settings.top_k
