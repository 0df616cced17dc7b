"""A run that tunes the first states of the model of a folder, from its files to a file of states."""

import time
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor
from transformers.trainer_utils import set_seed

from tarnn.decoding.opening import open_step
from tarnn.decoding.state_file import check_writable
from tarnn.families.weights import Weights, files_source
from tarnn.huggingface.wide import widen
from tarnn.log import Log
from tarnn.matmul import fast_matmul, product_size
from tarnn.training.arguments import training_arguments
from tarnn.training.error_messages import failures_explained
from tarnn.training.folder import write_settings
from tarnn.training.run import TrainResult, run, set_length, take_folder
from tarnn.tuning.run import make_task, open_to_tune, refuse_other_data, say_cost
from tarnn.tuning.states import FirstStates, write_states
from tarnn.tuning.task import TuneSettings
from tarnn.weight_files import WEIGHTS


def tune_state(
    settings: TuneSettings, path: Path, scale: float, report: Log, show: bool = True
) -> tuple[TrainResult, int]:
    """Train the states before the first token of the model in `settings.folder`, and write them to a file; return its size.

    settings.out: the folder of the run, for its log and checkpoints. scale: what the trained states are multiplied with. report:
    takes lines about what is to happen. show: show progress on stderr.

    Raises UserError for all that the user can mend; after Ctrl-C or SIGTERM, once it has saved, InterruptedRun.
    """
    started = time.monotonic()
    check_writable(path)
    args = training_arguments(settings)
    with failures_explained(settings.out), ExitStack() as stack:
        saved = take_folder(settings, stack)
        model = open_to_tune(settings.folder, settings, report)
        states = FirstStates(model)
        widen(model, model)
        task = make_task(settings, model, report)
        refuse_other_data(settings, saved, task)
        write_settings(settings.out, {"settings": settings.as_json(), "data": task.data_facts})
        set_length(args, settings, task)
        numbers = sum(S.numel() for S in states.states)
        say_cost(settings, task, states, model, args.max_steps, report)
        report(
            f"tarnn: {len(states.states)} states of {numbers:,} numbers; {task.summary(settings)}; {args.max_steps:,} steps"
        )
        set_seed(settings.seed)
        with fast_matmul(product_size(model, settings.length)):
            result = run(settings, args, task, states, show, started)
        return result, write_states(path, read_states(settings.out, scale), open_step(settings.folder))


def read_states(out: Path, scale: float) -> list[Tensor]:
    """Read the best states that a run left."""
    tensors = Weights(files_source(str(out), [out / WEIGHTS])[0])
    return [scale * tensors[name] for name in sorted(tensors, key=lambda name: int(name.rpartition(".")[2]))]
