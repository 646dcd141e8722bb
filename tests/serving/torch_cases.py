"""What the tests of the PyTorch model share: directories, batches, teacher forcing."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hla_jax.serving.torch import modeling_ouro
from hla_jax.serving.torch.looped_model import CACHE_NAME
from tiny import GOLDEN

MODELS = {
    "full": modeling_ouro.OuroForCausalLM,
    "hla": modeling_ouro.OuroHLAForCausalLM,
    "lla": modeling_ouro.OuroLLAForCausalLM,
}
GOLDEN_MAPS = {"hla": "hla_random.safetensors", "lla": "lla_svd.safetensors"}
PROMPTS = [[5, 9, 200, 31, 7, 7, 12, 90, 41], [3, 100], [17, 250, 8, 8, 61]]
"""Of different lengths, for the golden checkpoints."""


def golden_directory(name, kind, directory, **changes):
    """A golden checkpoint with a scheme's entry and maps, as an export would write it; with changes of the entry."""
    directory.mkdir()
    config = json.loads((GOLDEN / name / "config.json").read_text())
    tensors = load_file(GOLDEN / name / "model.safetensors")
    if kind != "full":
        about = json.loads((GOLDEN / name / "golden_codecs.json").read_text())
        config[f"{kind}_config"] = about[kind] | changes
        tensors |= load_file(GOLDEN / name / GOLDEN_MAPS[kind])
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def from_directory(directory, dtype=torch.float32):
    """A directory by its own code."""
    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype=dtype)


def left_padded(prompts):
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
    }


@torch.no_grad()
def forced(model, tokens, prompt_length):
    """Logits [B, S, V]: a prompt, and the rest one by one through the cache."""
    tokens = torch.tensor(np.asarray(tokens)).long()
    prompt = model(tokens[:, :prompt_length])
    rest = model(tokens[:, prompt_length:], cache=prompt[CACHE_NAME])
    return torch.cat([prompt.logits, rest.logits], dim=1).numpy()
