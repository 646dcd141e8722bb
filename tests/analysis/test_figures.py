"""A logarithmic axis has numbers to read, however far its values are apart."""

import pytest

from hla_jax.analysis import figures


@pytest.mark.parametrize("smallest", [0.02, 1e-3, 1e-10])
def test_a_logarithmic_axis_has_labels(smallest):
    y = [1.0, smallest]
    panel = figures.Panel("KL (nats)", {"one": ([1, 2], y, list(zip(y, y)))}, log=True)
    (axes, *_) = figures.panels([panel], "rank", styles=["one"], ticks=[1, 2]).axes
    low, high = axes.get_ylim()
    labels = [label for at, label in zip(axes.get_yticks(), axes.yaxis.get_ticklabels()) if low <= at <= high]
    assert 3 <= len(labels) <= 12
    assert all(label.get_text() for label in labels)
