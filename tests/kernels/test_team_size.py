"""How many threads a call of a program takes (csrc/runtime/team_size.h), by a model of a machine of 64 cores."""

import math

import pytest
from support.alone import build, output

CORES = 64
ONE_READS, ALL_READ = 12e9, 200e9  # bytes per second
MEETS = 0.1e-6  # seconds per thread and phase: each takes the counters' line once

# hidden size, layers, vocabulary, bytes of a weight → 2 to 8,000 million weights in layers
SHAPES = {
    "6 M, int8": (256, 8, 4_000, 1),
    "6 M, float32": (256, 8, 4_000, 4),
    "6 M with a large head": (256, 8, 250_000, 1),
    "100 M, int8": (768, 12, 32_000, 1),
    "0.8 B, bfloat16": (1024, 24, 248_000, 2),
    "7 B, int4": (4096, 32, 32_000, 0.5),
}


@pytest.fixture(scope="module")
def size_of_team(tmp_path_factory):
    program = build("team_size_alone", tmp_path_factory.mktemp("team_size"))

    def size(asked, processors, phases, num_bytes, tasks):
        return int(output(program, "size", *(str(x) for x in (asked, processors, phases, int(num_bytes), tasks))))

    return size


def phases(width, layers, vocabulary, weight):
    """Of a token: bytes and tasks of each phase. A layer is queries, keys and values; states; output; both halves of the MLP."""
    panels = width // 64
    products = [
        (3 * width**2, 3 * panels),
        (0, 12),
        (width**2, panels),
        (6 * width**2, 3 * panels),
        (3 * width**2, panels),
    ]
    return [(weight * n, tasks) for n, tasks in layers * products + [(vocabulary * width, -(-vocabulary // 64))]]


def seconds(step, threads):
    """Time of a step: no phase has more threads than tasks, but all of them meet behind it."""
    total = 0.0
    for num_bytes, tasks in step:
        taking = min(threads, tasks)
        total += max(num_bytes / tasks * math.ceil(tasks / taking) / ONE_READS, num_bytes / ALL_READ)
        total += MEETS * threads if threads > 1 else 0
    return total


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_on_many_cores_a_step_takes_threads_that_are_worth_it(size_of_team, shape):
    step = phases(*shape)
    num_bytes, largest = sum(x for x, _ in step), max(tasks for _, tasks in step)
    threads = size_of_team(CORES, "inf", len(step), num_bytes, largest)
    times = {n: seconds(step, n) for n in range(1, CORES + 1)}
    assert times[threads] <= times[1]
    assert times[threads] <= 2 * min(times.values())
    assert 1 <= threads <= min(CORES, largest)


def test_all_cores_for_a_small_model_are_worse_than_one(size_of_team):
    """What the limit is there for."""
    small = phases(128, 4, 4_000, 1)
    num_bytes = sum(x for x, _ in small)
    assert seconds(small, CORES) > 1.3 * seconds(small, 1)
    assert size_of_team(CORES, "inf", len(small), num_bytes, 63) == 1


def test_the_least_of_four_numbers(size_of_team):
    large = 60, 60 << 24, 100  # 16 MB a phase
    assert size_of_team(64, "inf", *large) == 64
    assert size_of_team(3, "inf", *large) == 3
    assert size_of_team(64, "2", *large) == 2  # a container of two processors, on 64 cores
    assert [size_of_team(64, x, *large) for x in ("1.5", "0.2", "1")] == [2, 1, 1]
    assert size_of_team(64, "inf", 60, 60 << 24, 7) == 7
    assert size_of_team(64, "inf", 60, 60 << 18, 100) == 5  # five phases of 256 KB
    assert size_of_team(64, "inf", 1, 0, 0) == 1
