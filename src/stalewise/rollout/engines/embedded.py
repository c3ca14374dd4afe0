"""The embedded engine: decodes with transformers' models in this process.

GPUs decode in slots (`slot_decode.py`), CPUs with a growing cache (`dynamic_decode.py`). Each response has its own
random numbers, so its tokens depend neither on the batch nor on the way of decoding. While the trainer works, weights
may be in host memory (`HFSampler.sleep`). `sampler.weights` simulates an engine in 8 bits: matrices are rounded in
place, and exact ones are restored later (`QuantizableWeights`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from stalewise.errors import ModelError
from stalewise.models.compilation import compile_pieces
from stalewise.models.fused_ops import fuse_for_decoding, fused_rotation
from stalewise.models.kernels import SlotState, StepRows, can_compile, warm_up_triton
from stalewise.models.loading import context_length, load_model, load_tokenizer, stop_token_ids, tensor_names
from stalewise.models.transfer import StorageOffload, replace_weights
from stalewise.rollout.engines.dynamic_decode import (
    RowCache,
    decode_dynamic,
    decode_within_memory,
    keeps_rows,
    rows_that_fit,
)
from stalewise.rollout.engines.paged_cache import (
    CACHE_SHARE,
    GIB,
    SLEEP_SHARE,
    advance_slots,
    power_of_two,
    read_slots,
)
from stalewise.rollout.engines.request_queue import LengthHistory, RequestQueue
from stalewise.rollout.engines.slot_decode import FinishedResponses, SlotDecoder, StepKernels, last_turns, slots_problem
from stalewise.rollout.engines.slot_turns import SlotTurns
from stalewise.rollout.sampler import Request, Response, TurnSource, check_lengths, open_turns, sample_in_rounds
from stalewise.rollout.token_sampling import device_uniforms
from stalewise.types import FinishReason, SamplerSettings

log = logging.getLogger(__name__)
FP8 = torch.float8_e4m3fn
LARGEST = {"fp8": torch.finfo(FP8).max, "int8": 127.0}  # the largest weight of each output is scaled to this
ROOM_STEP = 32  # prompt room is rounded up to a multiple of this, so that a decoder mostly fits the next prompts, too
POOL = 32_768  # requests that are sampled together on a GPU
POOL_TOKENS = 1 << 26  # limit of their tokens, so that long responses are committed now and then
# Share of a GPU's memory. torch keeps memory of prefills for their stream; the trainer's passes cannot use it.
UNUSED_SHARE = 0.03
LEAST_MEMORY = 0.1  # share of the free memory: a decoder that has no room in this much has no room at all


def fake_quantize(weight_OI: Tensor, kind: str) -> Tensor:
    """The matrix rounded to 8 bits, in its own precision."""
    exact_OI, largest = weight_OI.float(), LARGEST[kind]
    # An output whose weights are all 0 may have any scale except 0.
    scale_O1 = (exact_OI.abs().amax(dim=1, keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    scaled_OI = (exact_OI / scale_O1).clamp(-largest, largest)
    whole_OI = scaled_OI.to(FP8).float() if kind == "fp8" else scaled_OI.round()
    return (whole_OI * scale_O1).to(weight_OI.dtype)


class QuantizableWeights:
    """Switches a model between exact and rounded weights, in place, since CUDA graphs read fixed addresses."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kind = "exact"
        self._exact: list[Tensor] = []  # copies in host memory, while rounded weights are in use

    @torch.no_grad()
    def use(self, kind: str) -> None:
        """Switch to weights of this kind: "exact", "fp8" or "int8"."""
        if kind == self._kind:
            return
        matrices = linear_matrices(self._model)
        for matrix_OI, exact_OI in zip(matrices, self._exact, strict=False):
            matrix_OI.copy_(exact_OI)
        self._kind, self._exact = "exact", []
        if kind != "exact":
            self._exact = [matrix_OI.to("cpu", copy=True) for matrix_OI in matrices]
            for matrix_OI in matrices:
                matrix_OI.copy_(fake_quantize(matrix_OI, kind))
            self._kind = kind


def linear_matrices(model: Any) -> list[Tensor]:
    """The matrices [O, I] of all linear layers except the output layer, as views of the model's memory."""
    outside = [
        name
        for name, module in model.named_modules()
        if not isinstance(module, torch.nn.Conv1d) and any(p.ndim > 2 for p in module.parameters(recurse=False))
    ]
    embeddings = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    matrices = {
        id(module.weight): module.weight.data if isinstance(module, torch.nn.Linear) else module.weight.data.T
        for module in model.modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and id(module.weight) not in embeddings
    }
    if outside or not matrices:
        where = f"{outside[0]} holds matrices that are in no linear layer" if outside else "it has no linear layers"
        raise ModelError(
            f'the weights of {type(model).__name__} cannot be rounded: {where}; set sampler.weights = "exact"'
        )
    return list(matrices.values())


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
        fused: bool | None = None,
        should_compile: Callable[[Any], bool] = lambda model: False,
    ) -> None:
        """`slots` decodes in slots, `fused` fuses operators; both default to True on GPUs and False elsewhere.

        `should_compile` decides whether a model on a GPU is compiled instead of fused.
        """
        on_gpu = device.type == "cuda"
        self.settings = settings
        self.max_new_tokens = max_new_tokens
        self.on_tokens = on_tokens
        # A GPU is fastest with a large pool. On a CPU, batches must not depend on which shards were there before.
        self.preferred_batch_size = min(POOL, POOL_TOKENS // max_new_tokens) if on_gpu else 1
        self.streams = on_gpu  # on a CPU, scoring at the same time would slow down sampling
        self._device, self._dtype = device, dtype
        self._should_compile = should_compile
        if on_gpu:
            warm_up_triton()
        self._model: Any = None
        self._weights: QuantizableWeights | None = None
        self._offload = StorageOffload()  # of the weights, while the trainer works
        self._loaded: tuple[object, ...] | None = None  # identifies the loaded weights; None: unknown, always load
        self._replaceable: frozenset[str] = frozenset()  # tensor names that a later checkpoint must have
        self._tokenizer: Any = None
        self._stop_ids = torch.empty(0, dtype=torch.long, device=device)
        self._stops: list[int] = []  # the same on the host
        self._slots_wanted = on_gpu if slots is None else slots
        self._fusing = on_gpu if fused is None else fused
        self.fused: tuple[str, ...] = ()  # kinds of operators that were fused
        self.slots_problem = "not loaded"  # why responses are not decoded in slots; empty if they are
        self._decoder: SlotDecoder | None = None
        self._kernels: StepKernels | None = None
        self._history = LengthHistory()
        self._memory = 1.0  # share of the free memory for the decoder; halved when it runs out
        self.most_bytes = math.inf  # limit of the decoder's memory, if another process needs the rest

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint: the first call loads a model, later calls only replace its weights if they can."""
        weights = checkpoint / "model.safetensors"
        if self._loaded is not None and self._loaded == _file_identity(weights):
            self._wake()
            return
        names = tensor_names(weights) if weights.is_file() else frozenset()
        if self._model is None or not names or names != self._replaceable:
            self.close()  # two models at once may not fit
            self._load_model(checkpoint, names)
        else:
            self._replace(weights)
        self._weights, self._loaded = QuantizableWeights(self._model), _file_identity(weights)

    def _load_model(self, checkpoint: Path, names: frozenset[str]) -> None:
        self._model = load_model(str(checkpoint), device=self._device, dtype=self._dtype)
        self._tokenizer = load_tokenizer(str(checkpoint))
        stop_ids = stop_token_ids(self._model.config, self._model.generation_config, self._tokenizer)
        self._stop_ids = torch.tensor(stop_ids, dtype=torch.long, device=self._device)
        self._stops = list(stop_ids)  # on the host: the thread that makes responses must not use the device
        # Some architectures are stored under other names than in memory: such a model is loaded anew each time.
        self._replaceable = names if names <= self._model.state_dict().keys() else frozenset()
        compiling = self._device.type == "cuda" and self._should_compile(self._model)
        self.fused = fuse_for_decoding(self._model) if self._fusing and not compiling else ()
        log.debug("fused for decoding: %s", ", ".join(self.fused) or "nothing")
        self._kernels = _kernels(self._model)
        self.slots_problem = slots_problem(self._model, self._kernels) if self._slots_wanted else "not wanted"
        if self._slots_wanted and self.slots_problem:
            log.warning("responses are decoded without slots, which is slower: %s", self.slots_problem)
        if compiling and not self.slots_problem:
            compile_pieces(self._model)

    @torch.no_grad()
    def _replace(self, weights: Path) -> None:
        """Copy a checkpoint's weights into the model, tensor by tensor and directly to its device."""
        self._loaded = None
        state: dict[str, torch.Tensor] = self._model.state_dict()
        with safe_open(weights, framework="pt", device=str(self._model.device)) as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in self._replaceable}
            if wrong := sorted(name for name in shapes if shapes[name] != tuple(state[name].shape)):
                raise ModelError(f"{weights} is for another model: {wrong[0]} has shape {list(shapes[wrong[0]])}")
            self._wake(state[name] for name in self._replaceable)
            for name in self._replaceable:
                state[name].copy_(file.get_tensor(name))

    @torch.no_grad()
    def take(self, weights: Mapping[str, torch.Tensor], key: object) -> bool:
        """Copy weights from memory into the model; False if only `load` can change the weights."""
        if self._loaded == (key,):
            self._wake()
            return True
        if self._model is None or not self._replaceable or not self._replaceable <= weights.keys():
            return False
        self._loaded = None
        state: dict[str, torch.Tensor] = self._model.state_dict()
        self._wake(state[name] for name in self._replaceable)
        replace_weights((weights[name], state[name]) for name in self._replaceable)
        self._weights, self._loaded = QuantizableWeights(self._model), (key,)
        return True

    def close(self) -> None:
        """Free the model and its cache."""
        self._model = self._weights = self._loaded = None
        self._decoder = self._kernels = None  # both refer to the model
        self._offload = StorageOffload()

    def sleep(self, *, weights: bool = False, drop: bool = False) -> None:
        """Free the memory of the slots, if it is much, until the next call; `weights`: move these to host memory.

        `drop`: do not keep weights that the next policy replaces; one must be loaded before the next call.
        """
        on_gpu = self._device.type == "cuda"
        if weights and self._model is not None:
            self._decoder = None  # its CUDA graphs contain addresses of weights
            tensors = {**_named(self._model.named_parameters), **_named(self._model.named_buffers)}
            dropped = [tensors[name] for name in self._replaceable & tensors.keys()] if drop else []
            self._loaded = None if drop else self._loaded
            self._offload.offload(tensors.values(), dropped)
        elif self._decoder is not None and on_gpu and self._is_much(self._decoder.cache.nbytes, SLEEP_SHARE):
            self._decoder = None
        elif not on_gpu or not self._is_much(_unused_bytes(self._device), UNUSED_SHARE):
            return
        if on_gpu:
            torch.cuda.empty_cache()

    def _is_much(self, nbytes: int, share: float) -> bool:
        return nbytes > share * torch.cuda.mem_get_info(self._device)[1]

    def _wake(self, replaced: Iterable[Tensor] = ()) -> None:
        """Move weights back from host memory; those in `replaced` are not copied, as the caller overwrites them."""
        if self._offload.is_away:
            self._offload.reload(replaced)

    def _prepare(self, requests: Sequence[Request], settings: SamplerSettings) -> None:
        """Check the requests, and put the weights that the settings ask for on the device."""
        assert self._weights is not None, "call load first"
        self.check_lengths([request.prompt_ids for request in requests])
        self._wake()
        self._weights.use(settings.weights)

    @property
    def schedules(self) -> bool:
        """Whether requests begin in the order of their expected lengths, as they do in slots."""
        return self._slots_wanted

    def recall(self, prompts: Sequence[tuple[int, ...]], mean_lengths: Sequence[float]) -> None:
        """Record mean response lengths per prompt from before this process started, oldest first."""
        self._history.note(prompts, mean_lengths)

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the loaded policy."""
        return self._tokenizer

    def check_lengths(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that leave no room for a response."""
        check_lengths(prompt_ids, limit=context_length(self._model.config), max_new_tokens=self.max_new_tokens)

    def sample(self, requests: Sequence[Request], settings: SamplerSettings | None = None) -> list[Response]:
        """Responses in the order of the requests."""
        return self.stream(requests, settings or self.settings, lambda ended: None)

    def stream(
        self, requests: Sequence[Request], settings: SamplerSettings, on_ended: Callable[[Mapping[int, Response]], Any]
    ) -> list[Response]:
        """Responses in the order of the requests; as responses end, another thread calls `on_ended` with them."""
        self._prepare(requests, settings)
        responses: dict[int, Response] = {}

        def read(finished: FinishedResponses) -> None:
            ended = self._responses(finished)
            responses.update(ended)
            on_ended(ended)

        # One thread turns tokens into text while the device decodes.
        with ThreadPoolExecutor(max_workers=1) as reader:
            for future in [reader.submit(read, finished) for finished in self._decode(requests, settings)]:
                future.result()
        assert len(responses) == len(requests), "a response was lost"
        return [responses[index] for index in range(len(requests))]

    def sample_turns(self, requests: Sequence[Request], settings: SamplerSettings, turns: TurnSource) -> None:
        """Sample turn after turn; keys and values of earlier turns are kept, and only those of new tokens computed."""
        if not self.slots_problem:
            self._sample_turns_in_slots(requests, settings, turns)
            return
        kept = dict[int, RowCache]() if keeps_rows(self._model) else None
        begun = [list(request.begun) for request in requests]
        open_requests = list(range(len(requests)))
        while open_requests:
            # Always all open requests, so that batches on a CPU depend on the requests alone, to the last bit.
            batch = [replace(requests[number], begun=begun[number]) for number in open_requests]
            responses = self._sample_turn(batch, settings, kept, open_requests)
            for number, response in zip(open_requests, responses, strict=True):
                begun[number] += response.token_ids.tolist()
                turns.ended(number, response)
            answered = open_turns(turns.next(wait=True))
            for number, outside in answered:
                begun[number] += outside
            open_requests = [number for number, _ in answered]
            if kept is not None:
                kept = {number: kept[number] for number in open_requests}

    def _sample_turn(
        self,
        requests: Sequence[Request],
        settings: SamplerSettings,
        kept: dict[int, RowCache] | None,
        numbers: Sequence[int],
    ) -> list[Response]:
        """One turn of each request; `kept` has the cache of earlier turns by the requests' `numbers`; it is updated."""
        if kept is None or self._device.type != "cpu":  # a GPU without slots may not hold all rows at once
            return self.sample(requests, settings)
        self._prepare(requests, settings)
        rows = {row: kept[number] for row, number in enumerate(numbers) if number in kept}
        arrays = decode_dynamic(
            self._model,
            requests,
            settings,
            new_tokens=self.max_new_tokens,
            stop_ids=self._stop_ids,
            pad_id=self._tokenizer.pad_token_id,
            on_tokens=self.on_tokens,
            kept=rows,
        )
        kept.update({numbers[row]: cache for row, cache in rows.items()})
        responses = self._responses(FinishedResponses(np.arange(len(requests)), *arrays))
        return [responses[row] for row in range(len(requests))]

    def _sample_turns_in_slots(self, requests: Sequence[Request], settings: SamplerSettings, turns: TurnSource) -> None:
        """Sample turns in slots, which keep the cache of an episode; if that takes too much memory, in rounds."""
        self._prepare(requests, settings)
        begun = [list(request.begun) for request in requests]
        being_sampled = set(range(len(requests)))

        def on_turns(finished: FinishedResponses) -> None:
            before = np.array([len(begun[number]) for number in finished.requests.tolist()])
            for number, response in self._responses(last_turns(finished, before)).items():
                begun[number] += response.token_ids.tolist()
                being_sampled.discard(number)
                self.on_tokens(len(response.token_ids))
                turns.ended(number, response)

        def next_turns(wait: bool) -> list[tuple[int, list[int]]]:
            answered = turns.next(wait=False)
            while wait and not answered:
                answered = turns.next(wait=True)
            for number, outside in answered:
                begun[number] += outside
                if outside:
                    being_sampled.add(number)
            return answered

        queue = self._queue(requests)
        try:
            SlotTurns(self._slot_decoder(queue, settings), queue, on_turns, next_turns).run()
            return
        except torch.OutOfMemoryError as error:
            problem = str(error).splitlines()[0]
        self._use_less_memory(problem)
        sample_in_rounds(self, requests, settings, turns, begun=begun, first=sorted(being_sampled))

    def trial(self, requests: Sequence[Request], new_tokens: int) -> list[Response]:
        """Responses of exactly `new_tokens` tokens at temperature 1, for a comparison; nothing else is changed."""
        kept = self.max_new_tokens, self._stop_ids, self.on_tokens, self._decoder, self._history
        self.max_new_tokens = new_tokens
        self._stop_ids = self._stop_ids[:0]
        self.on_tokens = lambda count: None
        self._decoder = None
        self._history = LengthHistory()
        try:
            return self.sample(requests, replace(self.settings, temperature=1.0, top_p=1.0, top_k=0))
        finally:
            self.max_new_tokens, self._stop_ids, self.on_tokens, self._decoder, self._history = kept

    @property
    def model(self) -> Any:
        """The loaded policy, its weights on the device."""
        self._wake()
        return self._model

    def _decode(self, requests: Sequence[Request], settings: SamplerSettings) -> Iterator[FinishedResponses]:
        if not self.slots_problem:
            yield from self._decode_in_slots(requests, settings)
            return
        # Longest first, ties in order: rows of similar length are together and padding is small.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt_ids))
        decoded = decode_within_memory(
            self._model,
            [requests[i] for i in order],
            settings,
            rows=rows_that_fit(self._model, requests, self.max_new_tokens),
            new_tokens=self.max_new_tokens,
            stop_ids=self._stop_ids,
            pad_id=self._tokenizer.pad_token_id,
            on_tokens=self.on_tokens,
            log=log.warning,
        )
        for rows, arrays in decoded:
            yield FinishedResponses(np.array(order)[list(rows)], *arrays)

    def _decode_in_slots(self, requests: Sequence[Request], settings: SamplerSettings) -> Iterator[FinishedResponses]:
        """All responses; when memory runs out, unfinished responses begin anew with half of the memory."""
        left = np.arange(len(requests))
        while len(left):
            queue = self._queue([requests[i] for i in left.tolist()])
            is_done, problem = np.zeros(len(left), dtype=bool), ""
            try:
                for finished in self._slot_decoder(queue, settings).decode(queue, self.on_tokens):
                    is_done[finished.requests] = True
                    numbers = left[finished.requests]
                    begun = np.array([len(requests[number].begun) for number in numbers.tolist()])
                    yield last_turns(replace(finished, requests=numbers), begun)
                self._history.note(queue.prompts, queue.mean_lengths().tolist())
            except torch.OutOfMemoryError as error:
                problem = str(error).splitlines()[0]
            left = left[~is_done]
            if problem:  # after the handler: within it, the traceback would keep the memory
                self._use_less_memory(problem)

    def _queue(self, requests: Sequence[Request]) -> RequestQueue:
        return RequestQueue(requests, self.max_new_tokens, self._history)

    def _use_less_memory(self, problem: str) -> None:
        """Halve the memory for the decoder from now on; ModelError if it was halved too often."""
        size = self._decoder.size if self._decoder is not None else None
        self._decoder = None
        self._memory /= 2
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if self._memory < LEAST_MEMORY:
            free = torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0
            tried = f"; {size} were tried" if size is not None else ""
            fitting = int(CACHE_SHARE * free - size.row_bytes) // size.token_bytes - size.prompt_room if size else 0
            raise ModelError(
                f"out of memory while responses were sampled ({problem}){tried}, {free / GIB:.2f} GiB are free: lower "
                f"sampler.max_new_tokens = {self.max_new_tokens}"
                + (f" (one response of {fitting} tokens would fit)" if 0 < fitting < self.max_new_tokens else "")
                + ", or free memory on the device, or choose a smaller model"
            )
        log.warning("out of memory while sampling; retrying with half the memory for responses")

    def _slot_decoder(self, queue: RequestQueue, settings: SamplerSettings) -> SlotDecoder:
        """A decoder that is large enough: the last one if it fits, since a new one takes a second."""
        requests, prompts, longest = len(queue.seed_Q), len(queue.prompts), int(queue.prefix_P.max())
        decoder = self._decoder
        if decoder is None or not self._fits(decoder, queue, settings):
            if decoder is not None:  # room for both: calls alternate between training and evaluation
                requests, prompts = max(requests, decoder.requests), max(prompts, decoder.prompts)
                longest = max(longest, decoder.prompt_room)
            self._decoder = decoder = None  # free its memory before the size of the next is chosen
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
                expected=self._history.mean,
                memory=self._memory,
                most_bytes=self.most_bytes,
                kernels=self._kernels,
            )
        return decoder

    def _fits(self, decoder: SlotDecoder, queue: RequestQueue, settings: SamplerSettings) -> bool:
        """Whether a new decoder would have no more slots or blocks for these requests."""
        size, requests, prompts = decoder.size, power_of_two(len(queue.seed_Q)), power_of_two(len(queue.prompts))
        return (
            size.prompt_room >= queue.prefix_P.max()
            and size.new_tokens == self.max_new_tokens
            and _distribution(decoder.settings) == _distribution(settings)
            and size.slots >= min(requests, size.most_slots)
            and size.blocks >= min(size.needed(requests, prompts), size.most_blocks)
        )

    def _responses(self, finished: FinishedResponses) -> dict[int, Response]:
        """Responses, keyed by the number of their request."""
        lengths = finished.lengths
        is_token = np.arange(finished.ids.shape[1]) < lengths[:, None]
        ends = np.cumsum(lengths)[:-1]
        ids, logp = (np.split(array[is_token], ends) for array in (finished.ids, finished.logp))
        texts = decode_texts([tokens.tolist() for tokens in ids], self._tokenizer)
        stopped = np.isin([tokens[-1] for tokens in ids], self._stops)
        return {
            int(request): Response(token_ids, values, text, FinishReason.STOP if stop else FinishReason.LENGTH)
            for request, token_ids, values, text, stop in zip(finished.requests, ids, logp, texts, stopped, strict=True)
        }


def _kernels(model: Any) -> StepKernels | None:
    """Triton kernels for the parts of a step besides the model; None if they cannot be compiled."""
    if model.device.type != "cuda" or not can_compile():
        return None
    from stalewise.models.kernels import logits  # Triton is there for GPUs alone

    kernels = StepKernels(draw=logits.draw_on_device, while_capturing=partial(fused_rotation, model))
    if _same_uniforms(logits.uniforms_on_device, model.device):
        kernels = replace(kernels, uniforms=logits.uniforms_on_device)
    steps = {"read": logits.read_slots_on_device, "advance": logits.advance_slots_on_device}
    return replace(kernels, **steps) if _same_steps(**steps, device=model.device) else kernels


def _same_uniforms(uniforms: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> bool:
    """Whether these random numbers equal those of `device_uniforms`, to the last bit."""
    position = torch.arange(300, device=device)
    seed = position * 0x5DEECE66D_1234567  # wraps around
    try:
        return torch.equal(uniforms(seed, position), device_uniforms(seed, position))
    except Exception:  # from a compiler
        return False


def _same_steps(read: Callable[..., StepRows], advance: Callable[..., None], device: torch.device) -> bool:
    """Whether these functions read and advance slots as the functions in torch do."""
    slot_R = torch.tensor([5, 0, 3, 1, 4])
    token_R = torch.tensor([3, 8, 5, 6, 2])
    logp_R = -torch.arange(5.0)
    # Of six slots 0 and 1 stop, 3 has ended, 4 has given tokens and continues, 5 reaches its limit.
    numbers = torch.tensor([[7] * 6, [0, 2, 2, 3, 1, 3], [9] * 6, [5] * 6, [4] * 6, [0, 0, 0, 0, 2, 0]])
    alive_S = torch.arange(6) != 3
    block_SB = torch.arange(1, 19, dtype=torch.int32).view(6, 3)
    all_ids = torch.arange(30, dtype=torch.int32).view(6, 5)
    tensors = numbers, alive_S, block_SB, all_ids, torch.zeros(6, 5), torch.tensor([8, 6])

    def after(read: Callable[..., StepRows], advance: Callable[..., None]) -> list[Tensor]:
        slots = slot_R.to(device)
        copies = [x.clone().to(device) for x in tensors]
        state = SlotState(*copies, block_size=2, prompt_blocks=1)
        rows = read(slots, state)
        advance(slots, rows, token_R.to(device), logp_R.to(device), state)
        return [*rows, *copies]

    try:
        pairs = zip(after(read, advance), after(read_slots, advance_slots), strict=True)
        return all(torch.equal(result, expected) for result, expected in pairs)
    except Exception:  # from a compiler
        return False


def _unused_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator holds without a tensor in them."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _named(tensors: Callable[..., Iterable[tuple[str, Tensor]]]) -> dict[str, Tensor]:
    """Tensors of a model under all of their names."""
    return dict(tensors(remove_duplicate=False))


def _file_identity(file: Path) -> tuple[object, ...] | None:
    """Distinguishes a file from all others, also from later files of the same name; None if it does not exist."""
    if not file.is_file():
        return None
    stat = file.stat()
    return str(file), stat.st_ino, stat.st_size, stat.st_mtime_ns


def decode_texts(ids: list[list[int]], tokenizer: Any) -> list[str]:
    """Texts as from `batch_decode`; fast tokenizers decode on all cores without holding Python's lock."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or tokenizer.clean_up_tokenization_spaces:
        return tokenizer.batch_decode(ids, skip_special_tokens=True)
    return fast.decode_batch(ids, skip_special_tokens=True)


def _distribution(settings: SamplerSettings) -> tuple[float, ...]:
    """The settings that a decoding step depends on."""
    return settings.temperature, settings.top_p, settings.top_k
