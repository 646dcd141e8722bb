"""Fixtures of the tests that need PyTorch, or a trained model to serve."""

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """Threads that wait for each other cost more than these sizes compute."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def own_modules(tmp_path_factory):
    """Code of loaded directories goes to a temporary folder."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


@pytest.fixture(scope="session")
def trained_model(tmp_path_factory):
    """name -> the embedded model with trained maps, made when first asked for (best with `quick_compile`)."""
    from trained import trained

    made = {}

    def get(name):
        if name not in made:
            made[name] = trained(name, tmp_path_factory.mktemp("training"))
        return made[name]

    return get
