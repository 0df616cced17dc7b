"""Speech: the letters of recordings, by CTC."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarnn.data.pairs import Pair, read_pairs
from tarnn.errors import UserError
from tarnn.log import Log
from tarnn.tasks.base import Trained, register, sums
from tarnn.tasks.sequences import EncoderSettings, SequenceTask
from tarnn.tasks.settings import option
from tarnn.tasks.speech.recordings import LETTERS

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from torch.utils.data import Sampler

    from tarnn.data.examples import PaddedRows

FEATURES = 40  # of a frame
FILL = {"input_features": 0.0, "labels": -100}  # what a batch is padded with
SPEECH = {"conv_kernel": 15, "decay": "token", "position": "none"}  # keys of the config, by default


@dataclass(frozen=True)
class CtcSettings(EncoderSettings):
    """A run of `tarnn train --task ctc`. Sources are .tsv files (a recording, a tab, what is said) or .jsonl files."""

    audio_field: str = option("audio", "The field that holds the recording's path in jsonl.", "Speech")
    transcript_field: str = option("text", "The field that holds what is said in jsonl.", "Speech")
    subsampling: int = option(
        2, "Frames of 10 ms that make one place of the sequence.", "Speech", least=1, key="subsampling"
    )


@register
class CtcTask(SequenceTask):
    """A recording is the unit of progress, a letter that of the measure; the edits per letter of the likeliest path are
    counted as well."""

    name, of = "ctc", "recordings"
    architecture, next, reads_text = "TarnnForCTC", "predict", False
    settings_class = CtcSettings
    unit, counted, rates = "bits_per_letter", "recordings", ("letter_error_rate",)
    settings: CtcSettings

    def prepare(self, train: list[Pair], held_out: list[Pair], log: Log) -> tuple[PaddedRows, PaddedRows | None]:
        """Frames with the mean and the spread that those of the training data have, and letters."""
        import numpy as np

        from tarnn.tasks.speech.augmentation import AugmentedRows

        self.front = front_end(train)
        parts = [self.read(train), self.read(held_out)]
        every = np.concatenate([row["input_features"] for row in parts[0]])
        self.front.mean, self.front.std = every.mean(0).tolist(), (every.std(0) + 1e-5).tolist()
        mean, std = np.array(self.front.mean), np.array(self.front.std)  # float64
        for row in (row for part in parts for row in part):
            row["input_features"] = ((row["input_features"] - mean) / std).astype(np.float32)
        self.tokenizer = symbols_tokenizer(self.settings.out, LETTERS)
        self.front.save_pretrained(self.settings.out)
        train_rows = AugmentedRows(parts[0], FILL, self.settings.subsampling, self.settings.seed)
        return train_rows, padded(parts[1]) if held_out else None

    def sampler(self, num_examples: int, seed: int) -> Sampler[int]:
        """Return the order of the recordings: batches of similar length, drawn anew in every epoch."""
        from tarnn.tasks.speech.augmentation import SimilarLengths

        lengths = [len(row["input_features"]) for row in self.examples.rows]
        return SimilarLengths(lengths, num_examples, seed, self.settings.batch_size)

    def read_rows(self, sources: Sequence[str]) -> list[Pair]:
        """Paths are seen from the file that names them."""
        names = (self.settings.audio_field, self.settings.transcript_field)
        return [
            pair._replace(first=str(Path(source).expanduser().parent / pair.first))
            for source in sources
            for pair in read_pairs([source], *names, ("--audio-field", "--transcript-field"))
        ]

    @staticmethod
    def input_of(row: Pair) -> str:
        return row.first

    def examples_of(self, rows: list[Pair], trained: Trained, log: Log) -> PaddedRows:
        from tarnn.huggingface.speech_features import open_front_end

        self.settings = replace(self.settings, subsampling=trained.config.subsampling)
        self.front = open_front_end(trained.folder, trained.config.input_size)
        return padded(self.read(rows))

    def read(self, rows: Sequence[Pair]) -> list[dict[str, np.ndarray]]:
        """Frames and letters; UserError, with file and line, for what has no path that spells it."""
        from tarnn.tasks.speech.ctc import places_needed
        from tarnn.tasks.speech.recordings import Symbols, letters_of, read_wav

        symbols, examples = Symbols(LETTERS), []
        for row in rows:
            try:
                samples, rate = read_wav(row.first)
                self.front.check(samples, rate, row.first)
            except (UserError, OSError) as error:
                raise UserError(f"{row.place}: {error}") from error
            ids, frames = symbols.ids(letters_of(row.last), row.place), self.front.frames(samples)
            places = -(-len(frames) // self.settings.subsampling)
            if places < (needed := places_needed(ids)):
                raise UserError(
                    f"{row.place}: {row.first} has {places} places for {needed} letters (blanks between equal ones counted); "
                    "correct the transcript, or lower --subsampling."
                )
            examples.append({"input_features": frames, "labels": ids})
        return examples

    @classmethod
    def make_config(
        cls, settings: CtcSettings, tokenizer: Any = None, longest: int | None = None, **of_data: Any
    ) -> Any:
        """Give the model what speech needs, where nothing else is chosen: neighbours by convolutions, order by decay."""
        from tarnn.tasks.model import chosen, make_config

        choices, joined = chosen(settings), settings.subsampling
        if settings.preset != "paper":
            halves = joined > 1 and joined & (joined - 1) == 0
            choices = {**SPEECH, "front": "conv" if halves else "stack", **choices}
        return make_config(cls.classes()[0], settings, choices, of_data, longest)

    @classmethod
    def check(cls, settings: CtcSettings) -> None:
        cls.make_config(settings, input_size=FEATURES)

    def config(self) -> Any:
        return self.make_config(
            self.settings, input_size=self.front.feature_size, vocab_size=len(LETTERS) + 1, pad_token_id=0
        )

    def outcome(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Any]]:
        """Nats, letters, letters, and the edits that make the likeliest path's letters those that are said; and of each
        recording what was guessed and what is said."""
        import torch

        from tarnn.tasks.speech.ctc import best_path, edits

        out = model(**batch)
        logits = out.logits.float()
        lengths = model.model.embed_tokens.num_positions(batch["attention_mask"].sum(-1))
        real = batch["labels"] >= 0
        nats = torch.nn.functional.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1), batch["labels"][real], lengths, real.sum(-1), reduction="sum"
        )
        wanted = [row[row >= 0].tolist() for row in batch["labels"]]
        guessed = [best_path(row[:n].cpu().numpy()) for row, n in zip(logits, lengths.tolist())]
        wrong, count = sum(map(edits, guessed, wanted)), sum(map(len, wanted))
        return sums(nats, count, count, wrong), list(zip(guessed, wanted))

    def details(self, outcomes: list[Any]) -> dict[str, Any]:
        """word_error_rate: edits of words per word that is said."""
        from tarnn.tasks.speech.ctc import edits
        from tarnn.tasks.speech.recordings import SPACE, Symbols

        symbols = Symbols(LETTERS)
        words = [[symbols.text_of(ids).split(SPACE) for ids in pair] for pair in outcomes]
        words = [[[word for word in text if word] for text in pair] for pair in words]
        wrong, count = sum(edits(*pair) for pair in words), sum(len(wanted) for _, wanted in words)
        return {"words": count, "word_error_rate": wrong / max(1, count)}

    @property
    def row_end(self) -> str:
        return f", {self.front.sampling_rate:,} Hz"

    @classmethod
    def predict(cls, model: Any, reader: Any, inputs: Iterator[str], top: int) -> Iterator[dict[str, Any]]:
        """The letters of the likeliest path as "output"."""
        import torch

        from tarnn.tasks.speech.ctc import best_path
        from tarnn.tasks.speech.recordings import SPACE, Symbols, read_wav

        for path in inputs:
            samples, rate = read_wav(path)
            reader.check(samples, rate, path)
            frames = torch.from_numpy(reader.frames(samples))[None].to(model.device)
            ids = best_path(model(input_features=frames).logits[0].float().cpu().numpy())
            yield {"output": Symbols(LETTERS).text_of(ids).replace(SPACE, " ")}


def padded(rows: Sequence[dict[str, np.ndarray]]) -> PaddedRows:
    from tarnn.data.examples import PaddedRows

    return PaddedRows(rows, FILL)


def front_end(rows: Sequence[Pair]) -> Any:
    """Log-mel frames at the rate of the first recording."""
    from tarnn.huggingface.speech_features import SpeechFeatures
    from tarnn.tasks.speech.recordings import read_wav

    try:
        return SpeechFeatures(FEATURES, read_wav(rows[0].first)[1])
    except (UserError, OSError) as error:
        raise UserError(f"{rows[0].place}: {error}") from error


def symbols_tokenizer(folder: Path, names: Sequence[str]) -> Any:
    """Make a tokenizer of the blank (number 0) and the symbols, for `tarnn transcribe`; its vocab.json is in `folder`."""
    from transformers import Wav2Vec2CTCTokenizer

    from tarnn.tasks.speech.recordings import BLANK, SPACE

    file = folder / "vocab.json"
    file.write_text(json.dumps({name: i for i, name in enumerate((BLANK, *names, "<unk>"))}))
    return Wav2Vec2CTCTokenizer(file, bos_token=None, eos_token=None, pad_token=BLANK, word_delimiter_token=SPACE)
