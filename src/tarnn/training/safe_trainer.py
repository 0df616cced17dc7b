"""Hugging Face's Trainer with three things of ours: exact evaluation, safe checkpoints, a stop at NaN."""

import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import set_seed

from tarnn.data.tensor_file import flush
from tarnn.errors import UserError
from tarnn.numerics import widest
from tarnn.tasks.base import Trainable
from tarnn.tasks.text.windows import IGNORED
from tarnn.training import checkpoints
from tarnn.training.budget import Clock, TimeBudget
from tarnn.training.callbacks import Interruption
from tarnn.training.checkpoints import RunState
from tarnn.training.evaluation import measures
from tarnn.training.processes import largest, local, shard_on_cpu

CALIBRATION = 16  # examples


class ValidationGivenUpError(Exception):
    """A validation that was cut short by a signal; its sums are no measure."""


class SafeTrainer(Trainer):
    """Trains the model of a task on one endless row of its examples, epoch after epoch without a seam.

    `folder` receives the best model by bits per byte on held-out data, ready to be loaded (the latest, where there are
    none); `folder`/checkpoints the last `keep` checkpoints. Loops, optimizers, mixed precision, accumulation and
    many processes are the Trainer's. What the loss is, and what a batch costs, the task says.
    """

    def __init__(
        self,
        *,
        task: Trainable,
        args: TrainingArguments,
        folder: Path,
        keep: int,
        clock: Clock,
        interruption: Interruption,
        **kwargs: Any,
    ):
        self.task, self.folder, self.keep, self.clock = task, folder, keep, clock
        self.interruption = interruption
        self.batches = task.validation(args.eval_batch_size)
        self.run_state = RunState()
        self.budget: TimeBudget | None = None
        self._loss_of_step: Tensor | None = None
        super().__init__(
            args=args,
            train_dataset=task.examples,
            data_collator=task.collate,
            processing_class=task.tokenizer,
            eval_dataset=cast(Any, self.batches),
            **task.trainer_options(args),
            **kwargs,
        )
        self.model_accepts_loss_kwargs = True  # a loss that has the count of a step's targets is divided by it alone

    @property
    def has_stepped(self) -> bool:
        """Whether this process has finished a step."""
        return self.state.global_step > self.run_state.step

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and not self.is_fsdp_enabled:
            shard_on_cpu(self.accelerator, self.args)
            self.is_fsdp_enabled = True

    def forward_on_examples(self, model: Any) -> None:
        """The model on the first examples of the run: what its feature maps are calibrated with."""
        rows = cast(Any, self.train_dataset).__getitems__(list(self.task.sampler(CALIBRATION, self.args.seed)))
        self.task.loss(model, self._prepare_inputs(self.task.collate(rows)))

    # Data: one endless row of examples, so that epochs have no seam and a resumed run needs no special case.

    def _get_train_sampler(self, train_dataset=None) -> Sampler[int]:
        args = self.args
        examples = args.max_steps * args.gradient_accumulation_steps * args.train_batch_size * args.world_size
        return self.task.sampler(examples, args.seed)

    def floating_point_ops(self, inputs) -> int:
        return 0  # the Trainer would count all parameters anew at every step

    # Loss

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Tensor | None:
        """A step's targets, per process: all of them weigh the same. None where it has but one batch, or no targets."""
        targets = self.task.targets
        if targets is None or len(batch_samples) * self.args.world_size == 1:
            return None
        count = torch.stack([(batch[targets] != IGNORED).sum() for batch in batch_samples]).sum()
        return cast(Tensor, self.accelerator.reduce(count.to(device, widest(device)), "mean")).float()

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None):
        """The loss of this process's part of a step; the mean of all processes' is that of all targets."""
        # a task without targets need not know of counts
        return self.task.loss(model, inputs, *([] if num_items_in_batch is None else [num_items_in_batch]))

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        with self.task.within_step(inputs):
            loss = super().training_step(model, inputs, num_items_in_batch)
        self._loss_of_step = loss if self._loss_of_step is None else self._loss_of_step + loss
        return loss

    def _get_grad_norm(self, model, grad_norm=None):
        """Called with the gradients complete and the optimizer about to use them: the last moment to stop."""
        grad_norm = super()._get_grad_norm(model, grad_norm)
        loss, self._loss_of_step = self._loss_of_step, None
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        # a gradient scaler (fp16) expects overflows and passes such steps over
        watched = loss if getattr(self.accelerator, "scaler", None) is not None else loss + grad_norm
        if not math.isfinite(watched.item()):
            what = "" if loss.isfinite() else f"the loss is {loss.item()} and "
            step = self.state.global_step + 1
            self._stop(f"{what}the gradients are not finite, and step {step} would have ruined the weights")
        return grad_norm

    def _stop(self, reason: str) -> NoReturn:
        raise UserError(
            f"training stopped after step {self.state.global_step}: {reason}. {self.last_good()} A lower "
            f"--learning-rate (it is {self.args.learning_rate:g}) is the usual remedy; --resume takes it."
        )

    def last_good(self) -> str:
        path = checkpoints.latest(self.folder / "checkpoints")
        return f"The last good checkpoint is {path}." if path else "No checkpoint had been written yet."

    # Evaluation

    @torch.no_grad()
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Every validation batch once (or those that the time is enough for): exact on any number of processes."""
        batches = self.batches if eval_dataset is None else eval_dataset
        assert batches is not None
        assert self.model is not None
        started, reader, readers = self.clock(), self.args.process_index, self.args.world_size
        count = self.run_state.validation_batches or len(batches)
        chosen = [i * len(batches) // count for i in range(count)]
        self.model.eval()
        totals = torch.zeros(3 + len(self.task.rates), dtype=widest(self.args.device), device=self.args.device)
        for i in range(0, count, readers):  # every process takes part in every round: FSDP must gather
            sums = self.outcome(batches[chosen[min(i + reader, count - 1)]])
            totals += sums if i + reader < count else 0.0
            self.callback_handler.call_event(
                "on_prediction_step", self.args, self.state, self.control, done=i, of=count
            )
            if self.interruption.agreed():
                raise ValidationGivenUpError
        totals, seconds = self.accelerator.reduce(totals, "sum"), self.clock() - started
        if self.budget is not None:
            self.budget.has_validated(seconds)
        metrics = {f"{metric_key_prefix}_{name}": x for name, x in measures(self.task, totals).items()}
        metrics[f"{metric_key_prefix}_seconds"] = seconds
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def outcome(self, batch: dict[str, Tensor]) -> Tensor:
        """Compute the sums of a validation batch."""
        return self.task.outcome(self.model, self._prepare_inputs(batch))[0]

    @torch.no_grad()
    def prepare_validation(self, report: Callable[[str], None]) -> None:
        """With a budget of time: measure a batch, and cut a validation to the share of the time that it may take."""
        if self.budget is None or self.batches is None:
            return
        cast(Any, self.model).to(self.args.device).eval()
        for _ in range(2):  # the first pays for what is done once
            started = time.perf_counter()
            self.outcome(self.batches[0])
        every = self.run_state.validation_batches or len(self.batches)
        count = self.budget.plan_validation((time.perf_counter() - started) / self.args.world_size, every)
        if count < len(self.batches):
            self.run_state.validation_batches = count
            report(f"validation: {count:,} of {len(self.batches):,} batches, so that it takes a small part of the time")

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False) -> dict[str, float]:
        try:
            metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        except ValidationGivenUpError:
            self.control.should_training_stop = self.control.should_save = True
            self.control.should_evaluate = False
            return {}
        now, best = metrics["eval_measure"], self.run_state.best_measure
        if math.isfinite(now) and (best is None or now < best):
            self.run_state.best_measure, self.run_state.best_step = now, self.state.global_step
            self.save_best()
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """To the callbacks only. The Trainer's own history would be written anew with every checkpoint."""
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    # Checkpoints

    def save_best(self) -> None:
        """The model's files in `folder`, each replaced whole by a rename; the weights last."""
        if not self.task.keeps_model:
            return
        partial = self.folder / checkpoints.PARTIAL
        if self.args.should_save:
            checkpoints.sweep(self.folder)
        self.save_model(str(partial), _internal_call=True)
        if self.args.should_save:
            (partial / "training_args.bin").unlink(missing_ok=True)
            for path in sorted(partial.iterdir(), key=lambda path: path.suffix == ".safetensors"):
                flush(path)
                path.rename(self.folder / path.name)
            partial.rmdir()
            flush(self.folder)

    def _save_checkpoint(self, model, trial) -> None:
        """The Trainer's checkpoint, marked as complete when all of it is there."""
        assert self.model is not None
        started, folder = self.clock(), self.folder / "checkpoints"
        learned = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        if largest(not all(local(parameter).isfinite().all() for parameter in learned)):
            self._stop("the weights are no longer finite, so they were not saved")
        checkpoint = folder / f"checkpoint-{self.state.global_step}"
        self.run_state.step = self.state.global_step
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            self.run_state.seconds = self.clock()
            if self.budget is not None and self.budget.over:  # what is left was kept for the end
                self.run_state.seconds = max(self.run_state.seconds, self.budget.limit)
            if self.args.should_save:
                checkpoints.finish(checkpoint, self.run_state)
        except BaseException:
            shutil.rmtree(checkpoint, ignore_errors=True)  # give a full disk its room back
            raise
        if self.args.should_save:
            checkpoints.rotate(folder, self.keep)
        if self.batches is None or (self.interruption.signal and self.run_state.best_step is None):
            self.save_best()
        self.accelerator.wait_for_everyone()
        if self.budget is not None:
            self.budget.saving = self.clock() - started

    # Resuming

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        with checkpoints.reading(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Also for a process that the checkpoint has no random numbers of: the run had fewer, or another number."""
        folder = Path(checkpoint or "")
        if not (
            folder / ("rng_state.pth" if self.args.world_size == 1 else f"rng_state_{self.args.process_index}.pth")
        ).exists():
            set_seed((self.args.seed + self.args.process_index + 7919 * self.state.global_step) % 2**32)
            return
        with checkpoints.reading(folder):
            super()._load_rng_state(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """With the learning rate of now, should it be another than the checkpoint's."""
        with checkpoints.reading(Path(checkpoint or "")):
            super()._load_optimizer_and_scheduler(checkpoint)
        assert self.lr_scheduler is not None
        assert self.optimizer is not None
        ratio = self.args.learning_rate / self.lr_scheduler.base_lrs[0]
        if ratio != 1:
            for group in self.optimizer.param_groups:
                group["lr"] *= ratio
                group["initial_lr"] *= ratio
            self.lr_scheduler.base_lrs = [rate * ratio for rate in self.lr_scheduler.base_lrs]
            self.lr_scheduler._last_lr = [rate * ratio for rate in self.lr_scheduler._last_lr]

    def _init_training_state(self, max_steps, *args):
        """How often to log, evaluate and save: as asked for now, not as the checkpoint remembers."""
        result = super()._init_training_state(max_steps, *args)
        self.state.compute_steps(self.args, max_steps)
        return result

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        if self.budget is None or self.args.lr_scheduler_type == "constant":
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            assert optimizer is not None
            self.lr_scheduler = LambdaLR(optimizer, self.budget.factor)
            self._created_lr_scheduler = True
        return self.lr_scheduler
