"""What every command does with a mistake of the user's."""

import pytest

from experiments import command_line
from hla_jax.tensor_files import WeightsError


def test_a_mistake_is_one_line(monkeypatch):
    """Also where the hub's own words, which are quoted, have several."""
    monkeypatch.setattr(command_line.app, "run", lambda main: main(["command"]))

    def main():
        raise WeightsError("owner/name: no such directory, and as a hub id: Got: ConnectError\n  Check it.\n\n")

    with pytest.raises(SystemExit) as ended:
        command_line.run(main)
    assert ended.value.code == "error: owner/name: no such directory, and as a hub id: Got: ConnectError Check it."
