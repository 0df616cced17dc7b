"""A server that is killed under load loses nothing that it has told a client of."""

import pytest
from support.kill_serve import kill_under_load


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "Qwen3.5"])
def test_a_killed_server_remembers_what_it_has_told(served_folder, tmp_path, kind):
    assert kill_under_load(served_folder(kind), tmp_path, rounds=2) > 0
