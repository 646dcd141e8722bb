"""What every looped model is in PyTorch: it reads and runs the directories that `hla_jax.export` writes.

These files need PyTorch, transformers 5 and safetensors only, so an export can bring them along (`torch_code=True`):

    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    model.generate(**tokenizer(texts, return_tensors="pt", padding=True, padding_side="left"), max_new_tokens=64)

It is a reference: plain operations, no kernel, and a decoding step reads whole buffers. A call with an empty cache
reads its tokens as a prompt; later calls decode theirs one by one through the cache, whether sampled or given.

Shapes: B sequences, S tokens, V vocabulary, d hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .looped_cache import LoopedCache, wide
from .looped_files import MAP, checked_base, header, refuse, tensor_files
from .looped_schemes import HLA, LLA, FullCache, LoopedConfig, Shape

# transformers 5 began with `past_key_values` and went over to `cache`.
_CACHE = "cache" if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters else None
CACHE_NAME = _CACHE or "past_key_values"

Run = Callable[..., Tensor]
"""(tokens, attention, what else it takes of every token) -> hidden states [B, S, d]."""


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


class LoopedForCausalLM(PreTrainedModel, GenerationMixin):
    """A looped model with a cache scheme. A family has a class for each scheme; transformers drives them all alike."""

    config: LoopedConfig
    attention_module: str
    """Where a looped layer's attention is."""
    scheme: type[FullCache | HLA | LLA] = FullCache
    cache_class: type[LoopedCache]
    kinds: dict[str, type[Any]]
    """The family's class for each scheme."""
    _is_stateful = True  # the cache cannot forget tokens, so transformers refuses assisted generation
    _keys_to_ignore_on_load_missing = [MAP.pattern]  # noqa: RUF012 (`from_pretrained` looks at maps itself)

    def __init__(self, config: LoopedConfig):
        super().__init__(config)
        # By name: transformers may load the configuration's file and this one apart, which makes two classes of each.
        if config.scheme.name != self.scheme.name:
            raise ValueError(
                f"{type(self).__name__} has the cache scheme {self.scheme.__name__}, found a config of "
                f"{type(config.scheme).__name__}: take {self.kinds[config.scheme.name].__name__}"
            )

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

        The result's class is that of the directory's scheme, whichever of `kinds` is asked: transformers remembers one
        model class for a configuration class, and exports of several schemes share theirs.

        Raises:
          ValueError: tensors are missing or unknown, or the base is not the model that the maps were fitted to.
        """
        source, report = pretrained_model_name_or_path, options.pop("output_loading_info", False)
        hub = ("revision", "cache_dir", "token", "local_files_only")
        where = {name: options[name] for name in hub if name in options}
        if not isinstance(config, PretrainedConfig):
            of_family: Any = cls.config_class
            config = of_family.from_pretrained(source if config is None else config, **where)
        if config.scheme.name != cls.scheme.name:
            kind = cls.kinds[config.scheme.name]
            kind._auto_class = cls._auto_class
            return kind.from_pretrained(source, *args, config=config, output_loading_info=report, **options)
        files = tensor_files(source, **where)
        expected = {
            f"{cls.attention_module.format(layer=layer)}.{config.scheme.name}.{name}"
            for layer in range(config.num_hidden_layers)
            for name in config.scheme.map_shapes(config)
        }
        maps = {name: file for file in files for name in header(file)[0] if MAP.fullmatch(name)}
        refuse(f"{source}: {', '.join(file.name for file in files)}", expected - maps.keys(), maps.keys() - expected)
        base, entry = source, getattr(config, "base_model", None)
        if entry is not None:
            base = checked_base(source, entry)
            options = {name: option for name, option in options.items() if name != "revision"}
            del config.base_model
        model, info = super().from_pretrained(base, *args, config=config, output_loading_info=True, **options)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        # A base that is an export itself may have maps of its own, which do not count.
        unknown = {name for name in info["unexpected_keys"] if entry is None or not MAP.fullmatch(name)}
        refuse(str(base), set(info["missing_keys"]) - tied, unknown)
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
        cache: LoopedCache | None = None,
        past_key_values: LoopedCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        num_steps: int | None = None,
        initial_state: str | Tensor | None = None,
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
          num_steps: of Huginn, loops of a new cache; None for the config's.
          initial_state: of Huginn, "random", "zeros" or states [B, S, d], see `modeling_huginn`; None for the config's.

        Raises:
          ValueError: something of this cannot be done; the message says what.
        """
        if input_ids is None or kwargs.get("inputs_embeds") is not None:
            raise ValueError("second passes read tokens again: give input_ids, not inputs_embeds")
        if kwargs.get("output_attentions") or kwargs.get("output_hidden_states"):
            raise ValueError(
                "output_attentions and output_hidden_states are not supported: they differ from loop to loop"
            )
        cache = past_key_values if cache is None else cache
        if cache is None:
            cache = self.new_cache(num_steps)
        elif not isinstance(cache, self.cache_class):
            raise ValueError(f"this model needs its own cache, model.new_cache(); found {type(cache).__name__}")
        elif num_steps not in (None, cache.num_loops):
            raise ValueError(f"num_steps must be the cache's, {cache.num_loops}; found {num_steps}")
        run, given = self.runs(input_ids, cache, initial_state)
        hidden = cache.read(run, input_ids, attention_mask, position_ids, *given)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        logits = logits.to(wide(logits.dtype))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        returned: Any = {CACHE_NAME: cache} if use_cache or use_cache is None else {}
        out = CausalLMOutputWithPast(loss=loss, logits=logits, **returned)
        return out.to_tuple() if return_dict is False else out

    def runs(self, tokens: Tensor, cache: LoopedCache, initial_state: Any) -> tuple[Run, tuple[Tensor, ...]]:
        """What the cache runs, and what it takes of every token of `tokens` [B, S], see `LoopedCache.read`."""
        raise NotImplementedError

    def new_cache(self, num_steps: int | None = None) -> LoopedCache:
        """An empty cache; of Huginn, for so many steps."""
        return self.cache_class(self.config, self.get_input_embeddings().weight.dtype)

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
            raise ValueError(
                f"cache_implementation {generation_config.cache_implementation!r}: this model has its own cache"
            )
        if getattr(generation_config, "prefill_chunk_size", None) is not None:
            raise ValueError("prefill_chunk_size: a prompt is read in one exact pass")
        if generation_config.use_cache is False:
            raise ValueError("use_cache=False would read every token as a prompt; the cache scheme is what decodes")
        if model_kwargs.get(CACHE_NAME) is None:
            model_kwargs[CACHE_NAME] = self.new_cache(model_kwargs.get("num_steps"))
