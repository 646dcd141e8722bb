"""Ouro in PyTorch with the full cache, HLA or LLA: it reads and runs the directories that `hla_jax.export` writes.

These files need PyTorch, transformers 5 and safetensors only, so an export can bring them along (`torch_code=True`):

    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    model.generate(**tokenizer(texts, return_tensors="pt", padding=True, padding_side="left"), max_new_tokens=64)

It is a reference: plain operations, no kernel, and a decoding step reads whole buffers. A call with an empty cache
reads its tokens as a prompt; later calls decode theirs one by one through the cache, whether sampled or given.

Shapes: B sequences, S tokens, V vocabulary, d hidden size.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import cached_file

from .cache_ouro import Attend, FullOuroCache, Inputs, OuroCache, wide
from .configuration_ouro import HLA, LLA, FullCache, OuroConfig, Shape
from .latent_cache_ouro import HLACache, LLACache

# transformers 5 began with `past_key_values` and went over to `cache`.
_CACHE = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else None
CACHE_NAME = _CACHE or "past_key_values"

_MAP = re.compile(r"model\.layers\.\d+\.self_attn\.(hla|lla|head_latent|layer_latent|low_bit|shared_loop)\.\w+")


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wider = x.to(wide(x.dtype))
        return self.weight * (wider * torch.rsqrt(wider.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Maps(nn.Module):
    """A scheme's maps of one layer."""

    def __init__(self, shapes: Mapping[str, Shape]):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


class OuroAttention(nn.Module):
    def __init__(self, config: OuroConfig, layer: int):
        super().__init__()
        d, size, self.layer = config.hidden_size, config.head_dim, layer
        self.size = size
        self.q_proj = nn.Linear(d, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(d, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(d, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, d, bias=False)
        # Maps are a module under the scheme's name, as in the names of their tensors.
        if shapes := config.scheme.map_shapes(config):
            self.add_module(config.scheme.name, Maps(shapes))

    @property
    def maps(self) -> nn.Module | None:
        return getattr(self, "hla", getattr(self, "lla", None))

    def forward(self, h: Tensor, loop: int, attend: Attend) -> Tensor:
        q, k, v = (project(h).unflatten(-1, (-1, self.size)) for project in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(Inputs(h, q, k, v, loop, self.layer, self.maps)).flatten(2))


class OuroMLP(nn.Module):
    def __init__(self, config: OuroConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class OuroLayer(nn.Module):
    def __init__(self, config: OuroConfig, layer: int):
        super().__init__()
        norm = lambda: RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = OuroAttention(config, layer)
        self.mlp = OuroMLP(config)
        self.input_layernorm, self.input_layernorm_2 = norm(), norm()
        self.post_attention_layernorm, self.post_attention_layernorm_2 = norm(), norm()

    def forward(self, x: Tensor, loop: int, attend: Attend) -> Tensor:
        x = x + self.input_layernorm_2(self.self_attn(self.input_layernorm(x), loop, attend))
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class OuroModel(nn.Module):
    """The same layers, applied T times. The normed state after a loop feeds the next one."""

    def __init__(self, config: OuroConfig):
        super().__init__()
        self.num_loops = config.total_ut_steps
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OuroLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Kept with the weights; generation always takes the last loop.
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        x = self.embed_tokens(tokens)
        for loop in range(self.num_loops):
            for layer in self.layers:
                x = layer(x, loop, attend)
            x = self.norm(x)
        return x


class OuroForCausalLM(PreTrainedModel, GenerationMixin):
    """Ouro with the full cache; the subclasses have the latent ones."""

    config: OuroConfig
    config_class = OuroConfig
    base_model_prefix = "model"
    scheme: type[FullCache | HLA | LLA] = FullCache
    cache_class: type[OuroCache] = FullOuroCache
    _no_split_modules = ["OuroLayer"]  # noqa: RUF012
    _is_stateful = True  # the cache cannot forget tokens, so transformers refuses assisted generation
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _keys_to_ignore_on_load_missing = [_MAP.pattern]  # noqa: RUF012 (`from_pretrained` looks at maps itself)

    def __init__(self, config: OuroConfig):
        super().__init__(config)
        # By name: transformers may load the configuration's file and this one apart, which makes two classes of each.
        if config.scheme.name != self.scheme.name:
            raise ValueError(
                f"{type(self).__name__} has the cache scheme {self.scheme.__name__}, found a config of "
                f"{type(config.scheme).__name__}: take {KINDS[config.scheme.name].__name__}"
            )
        self.model = OuroModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Maps):
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **options: Any
    ) -> Any:
        """As in transformers, with maps-only directories read together with their base.

        The result's class is that of the directory's scheme, whichever of `KINDS` is asked: transformers remembers one
        model class for a configuration class, and exports of several schemes share theirs.

        Raises:
          ValueError: tensors are missing or unknown, or the base is not the model that the maps were fitted to.
        """
        source, report = pretrained_model_name_or_path, options.pop("output_loading_info", False)
        hub = ("revision", "cache_dir", "token", "local_files_only")
        where = {name: options[name] for name in hub if name in options}
        if not isinstance(config, PretrainedConfig):
            config = cls.config_class.from_pretrained(source if config is None else config, **where)
        if config.scheme.name != cls.scheme.name:
            kind = KINDS[config.scheme.name]
            kind._auto_class = cls._auto_class
            return kind.from_pretrained(source, *args, config=config, output_loading_info=report, **options)
        files = _tensor_files(source, **where)
        expected = {
            f"model.layers.{layer}.self_attn.{config.scheme.name}.{name}"
            for layer in range(config.num_hidden_layers)
            for name in config.scheme.map_shapes(config)
        }
        maps = {name: file for file in files for name in _header(file)[0] if _MAP.fullmatch(name)}
        _refuse(f"{source}: {', '.join(file.name for file in files)}", expected - maps.keys(), maps.keys() - expected)
        base, entry = source, getattr(config, "base_model", None)
        if entry is not None:
            base = checked_base(source, entry)
            options = {name: option for name, option in options.items() if name != "revision"}
            del config.base_model
        model, info = super().from_pretrained(base, *args, config=config, output_loading_info=True, **options)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        # A base that is an export itself may have maps of its own, which do not count.
        unknown = {name for name in info["unexpected_keys"] if entry is None or not _MAP.fullmatch(name)}
        _refuse(str(base), set(info["missing_keys"]) - tied, unknown)
        if entry is not None:
            parameters = dict(model.named_parameters())
            for name, file in maps.items():
                with safe_open(file, "pt") as tensors, torch.no_grad():
                    stored = tensors.get_tensor(name)
                    if stored.shape != parameters[name].shape:
                        raise ValueError(
                            f"{file}: {name} must be {list(parameters[name].shape)}, found {list(stored.shape)}"
                        )
                    parameters[name].copy_(stored)
        return (model, info) if report else model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: OuroCache | None = None,
        past_key_values: OuroCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits of tokens [B, S]: of prompts with an empty cache, else decoded one by one after what the cache holds.

        Args:
          input_ids: token ids; with a cache, the new ones only.
          attention_mask: [B, tokens so far], 0 for padding, which may be on either side of a prompt.
          position_ids: optional, and checked: every sequence counts its own tokens from 0.
          cache: from an earlier call, or `new_cache()`; `past_key_values` is its older name.
          labels: [B, S] for a loss.
          use_cache: whether to return the cache; true by default.
          logits_to_keep: the last so many tokens' logits, or those of some indices; 0 is all.

        Raises:
          ValueError: something of this cannot be done; the message says what.
        """
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise ValueError("Ouro's second passes read tokens again: give input_ids, not inputs_embeds")
        if kwargs.get("output_attentions") or kwargs.get("output_hidden_states"):
            raise ValueError(
                "output_attentions and output_hidden_states are not supported: they differ from loop to loop"
            )
        cache = past_key_values if cache is None else cache
        if cache is None:
            cache = self.new_cache()
        elif not isinstance(cache, self.cache_class):
            raise ValueError(f"this model needs its own cache, model.new_cache(); found {type(cache).__name__}")
        hidden = cache.read(self.model, input_ids, attention_mask, position_ids)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        logits = logits.to(wide(logits.dtype))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        returned: Any = {CACHE_NAME: cache} if use_cache or use_cache is None else {}
        out = CausalLMOutputWithPast(loss=loss, logits=logits, **returned)
        return out.to_tuple() if return_dict is False else out

    def new_cache(self) -> OuroCache:
        """An empty cache."""
        return self.cache_class(self.config)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict, *args: Any, **kwargs: Any
    ) -> None:
        """Where `generate` makes its cache."""
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError('generate needs padding on the left: make the tokenizer pad with padding_side="left"')
        if generation_config.cache_implementation is not None:
            raise ValueError(f"cache_implementation {generation_config.cache_implementation!r}: Ouro has its own cache")
        if getattr(generation_config, "prefill_chunk_size", None) is not None:
            raise ValueError("prefill_chunk_size: a prompt is read in one exact pass")
        if generation_config.use_cache is False:
            raise ValueError("use_cache=False would read every token as a prompt; the cache scheme is what decodes")
        if model_kwargs.get(CACHE_NAME) is None:
            model_kwargs[CACHE_NAME] = self.new_cache()


class OuroHLAForCausalLM(OuroForCausalLM):
    """Ouro with Hybrid Latent Attention."""

    scheme = HLA
    cache_class = HLACache


class OuroLLAForCausalLM(OuroForCausalLM):
    """Ouro with Looped Latent Attention."""

    scheme = LLA
    cache_class = LLACache


KINDS: dict[str, type[OuroForCausalLM]] = {
    kind.scheme.name: kind for kind in (OuroForCausalLM, OuroHLAForCausalLM, OuroLLAForCausalLM)
}


# Files.


def _refuse(where: str, missing: set[str], unknown: set[str]) -> None:
    for problem, names in (("missing", missing), ("unknown", unknown)):
        if names:
            first = ", ".join(sorted(names)[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(f"{where}: {problem} tensors {first}{more}")


def _tensor_files(source: Any, **where: Any) -> list[pathlib.Path]:
    """The safetensors files of a directory or hub repository."""
    index = cached_file(source, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False, **where)
    names = ["model.safetensors"]
    if index is not None:
        names = sorted(set(json.loads(pathlib.Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
    return [pathlib.Path(str(cached_file(source, name, **where))) for name in names]


def _header(file: pathlib.Path) -> tuple[dict[str, Any], int]:
    """What a safetensors file says of its tensors, and where their bytes begin."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def fingerprint(files: list[pathlib.Path]) -> str:
    """Identity of a model's own tensors: the SHA-256 of one JSON line a tensor, sorted by name, maps left out."""
    lines = {}
    for file in files:
        header, start = _header(file)
        with file.open("rb") as stream:
            for name, about in header.items():
                if not _MAP.fullmatch(name):
                    begin, end = about["data_offsets"]
                    stream.seek(start + begin)
                    digest = hashlib.sha256(stream.read(end - begin)).hexdigest()
                    lines[name] = json.dumps([name, about["dtype"], about["shape"], digest], separators=(",", ":"))
    return hashlib.sha256("".join(f"{lines[name]}\n" for name in sorted(lines)).encode()).hexdigest()


def checked_base(source: Any, entry: Any) -> str:
    """The path or hub id of the model that a maps-only directory belongs to, once its tensors are known to be its."""
    base = entry.get("id", entry.get("path")) if isinstance(entry, dict) else None
    if not isinstance(base, str) or not isinstance(entry.get("sha256"), str):
        raise ValueError(f"{source}: config.json: base_model must have id or path, and sha256; found {entry!r}")
    try:
        files = _tensor_files(base)
    except OSError as error:
        raise ValueError(f"{source}: config.json: base_model not found: {error}") from None
    if (found := fingerprint(files)) != entry["sha256"]:
        raise ValueError(
            f"{source}: these maps belong to another base model than {base}: "
            f"expected sha256 {entry['sha256']}, found {found}"
        )
    return base
