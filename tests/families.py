"""Tiny random models of many families, a task for them, and how far a run's log-probabilities are from a plain forward
pass. The comparison shares no code with the package: it reads what the run wrote.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from stalewise import store
from stalewise.models import EMBEDDED
from stalewise.store.token_log import read_tokens, token_log_directory
from stalewise.tasks import TASKS
from stalewise.tasks.base import LocalVerifier
from stalewise.types import Prompt, Reward

# Settings of a tiny model, under the names of transformers' configs; each config takes those that it has.
TINY: dict[str, Any] = {
    "vocab_size": 18,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "dff", "dim_ff"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "d_kv": 8,
    "dim_head": 8,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 16),
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "n_mamba_heads": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "state_size": 8,
    "n_groups": 1,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "lru_width": 32,
    "attention_hidden_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "sliding_window": 8,
    "attention_window_size": 8,
    "block_size": 8,
}
ALTERNATING = {"layer_types": ["linear_attention", "full_attention"]}
LATENT = {"num_key_value_heads": 4, "head_dim": 4}  # of models that compress keys and values
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0, 8.0, 16.0, 32.0],
    "original_max_position_embeddings": 16,
}
# Families by name: transformers' model type, and settings beyond TINY.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {})
        for name in (
            *("afmoe", "apertus", "arcee", "aria_text", "bart", "bert", "biogpt", "bitnet", "blenderbot", "bloom"),
            *("codegen", "cohere", "cohere2", "cwm", "ctrl", "diffllama", "doge", "dots1", "ernie4_5", "ernie4_5_moe"),
            *("exaone4", "falcon", "falcon_mamba", "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
            *("glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe"),
            *("granitemoeshared", "helium", "jetmoe", "llama", "mamba"),
            *("marian", "mbart", "minimax_m2", "mistral", "mixtral", "modernbert-decoder", "mpt"),
            *("nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "openai-gpt", "opt", "persimmon", "phi"),
            *("phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "roberta", "rwkv", "seed_oss"),
            *("smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma", "xglm", "xlnet", "recurrent_gemma"),
        )
    },
    **{name: (name, {"head_dim": 8}) for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{name: (name, LATENT) for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3")},
    "bamba": ("bamba", {"attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", {}),
    "gemma3n_text": ("gemma3n_text", {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 18}),
    "gpt_neo": ("gpt_neo", {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "granitemoehybrid": ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}),
    "jamba": ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "kimi_linear": ("kimi_linear", {**ALTERNATING, **LATENT}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "llama4_text": ("llama4_text", {"intermediate_size_mlp": 48, "attention_chunk_size": 8}),
    "mamba2": ("mamba2", {"num_heads": 4, "head_dim": 16}),
    "minimax": ("minimax", ALTERNATING),
    "mixtral-jitter": ("mixtral", {"router_jitter_noise": 0.3}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["mamba", "attention", "moe"]}),
    "olmo_hybrid": ("olmo_hybrid", ALTERNATING),
    "phi3": ("phi3", {}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    "qwen3_5_text": ("qwen3_5_text", ALTERNATING),
    "qwen3_next": ("qwen3_next", ALTERNATING),
    "reformer": (
        "reformer",
        {
            "is_decoder": True,
            "attn_layers": ["local", "local"],
            "axial_pos_embds": False,
            "feed_forward_size": 48,
            "local_attn_chunk_length": 8,
            "attention_head_size": 8,
        },
    ),
    "zamba": (
        "zamba",
        {
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_hidden_layers": 4,
            "attention_hidden_size": 64,
        },
    ),
    "zamba2": (
        "zamba2",
        {
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "num_hidden_layers": 4,
            "chunk_size": 8,
            "num_key_value_heads": 4,
        },
    ),
}
# A dozen for the ordinary tests: plain, learned positions, experts, windows, latent and linear attention, state space.
DOZEN = (
    "llama",
    "gpt2",
    "opt",
    "bloom",
    "mixtral",
    "mistral",
    "deepseek_v3",
    "mamba",
    "lfm2",
    "qwen3_next",
    "rwkv",
    "bart",
)
SPREAD = 1.5  # of the logits, at most
_AS_MADE = ("A_log", "conv", "dt_", "time_", "inv_freq", "rope")  # parameters that are not plain matrices


class Coins:
    """Prompts of 1 to 24 digits. A response is worth 1 if its characters add up to an even number."""

    name, size = "coins", None

    def __init__(self, seed: int) -> None:
        self.seed, self.verifier = seed, _Parity()

    def prompts(self, start: int, count: int) -> list[Prompt]:
        return [Prompt(prompt_id=f"p{i}", text=self._digits(i), answer="8") for i in range(start, start + count)]

    def evaluation_prompts(self, count: int) -> list[Prompt]:
        return [Prompt(prompt_id=f"e{i}", text=self._digits(10_000 + i), answer="8") for i in range(count)]

    def _digits(self, number: int) -> str:
        generator = torch.Generator().manual_seed(number)
        length = int(torch.randint(1, 25, (1,), generator=generator))
        return "".join(map(str, torch.randint(0, 10, (length,), generator=generator).tolist()))


class _Parity(LocalVerifier):
    def judge(self, prompt: Prompt, response: str) -> Reward:
        return Reward(float(sum(map(ord, response)) % 2 == 0))


TASKS["coins"] = f"{__name__}:Coins"


def build(family: str, directory: Path) -> Any:
    """Write a tiny model of the family with the tokenizer of the embedded policy; its weights are large enough for
    logits that differ by some nats.
    """
    kind, settings = FAMILIES[family]
    config_class: Any = CONFIG_MAPPING[kind]
    known = set(getattr(config_class, "__dataclass_fields__", {})) or set(config_class().to_dict())
    default = config_class()
    chosen = {name: value for name, value in TINY.items() if name in known and _has(default, name)}
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config_class(**{**chosen, **settings})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not any(part in name for part in _AS_MADE):
                is_embedding = parameter is getattr(model.get_input_embeddings(), "weight", None)
                parameter.normal_(0, 0.5 if is_embedding else 1.2 * parameter.shape[-1] ** -0.5)
        # Otherwise some families would say the same in all responses to a prompt, and there were nothing to learn.
        logits = model(input_ids=torch.arange(3, 18)[None], use_cache=False).logits.float()
        head = model.get_output_embeddings()
        if head is not None:
            head.weight.mul_(float((SPREAD / logits.std(dim=-1).mean()).clamp(max=1)))
    model.generation_config.eos_token_id = [1, 3, 4]  # so that responses end before they are truncated
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / "arithmetic" / name, directory / name)
    return model


def _has(default: Any, name: str) -> bool:
    """Windows stay off where a family has them off, and widths that follow from others stay unset."""
    return not (name in ("sliding_window", "head_dim", "rotary_dim") and getattr(default, name, None) is None)


def settings(directory: Path, runs: Path, name: str, **learner: Any) -> dict[str, Any]:
    """A run of two updates."""
    return {
        "name": name,
        "runs": str(runs),
        "model": {"path": str(directory), "device": "cpu", "precision": "float32"},
        "task": {"name": "coins"},
        "schedule": {"kind": "staged", "updates": 2, "stages": 2},
        "batch": {"prompts": 4, "group_size": 8},
        "sampler": {"max_new_tokens": 8, "rollouts_per_shard": 16},
        "evaluation": {"prompts": 2, "samples": 1},
        "optimizer": {"learning_rate": 1e-4},
        "learner": learner,
    }


@torch.no_grad()
def plain_logp(model: Any, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of the response's tokens: one sequence, no cache, no padding."""
    ids = torch.tensor([[*prompt, *response]])
    logp = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(dim=-1)
    return logp[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0]


def differences(directory: Path, run: Path) -> tuple[float, float]:
    """Largest difference, in nats, of version 0's recorded values from a plain forward pass: sampled, learned."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    batch = store.open_batch(next(iter(store.batch_directories(run / "rollouts"))))
    table = read_tokens(token_log_directory(run), 0)
    learned = dict(zip(table.column("rollout_id").to_pylist(), table.column("logp").to_pylist(), strict=True))
    sampling, learning = 0.0, 0.0
    for rollout in batch.iter_rollouts():
        expected = plain_logp(model, rollout.prompt_ids, rollout.response_ids)
        sampling = max(sampling, float((torch.tensor(rollout.behaviour_logp) - expected).abs().max()))
        if rollout.rollout_id in learned:
            learning = max(learning, float((torch.tensor(learned[rollout.rollout_id]) - expected).abs().max()))
    return sampling, learning if learned else float("nan")
