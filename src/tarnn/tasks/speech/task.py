"""Speech: the letters of recordings, by CTC."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tarnn.data.pairs import Pair, read_pairs
from tarnn.errors import UserError
from tarnn.tasks.base import Report, Trained, register
from tarnn.tasks.sequences import EncoderSettings, SequenceTask, facts_of, refuse_other_data, split
from tarnn.tasks.settings import option

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from tarnn.data.examples import PaddedRows


@dataclass(frozen=True)
class CtcSettings(EncoderSettings):
    """A run of `tarnn train --task ctc`. Sources are .tsv files (a recording, a tab, what is said) or .jsonl files."""

    audio_field: str = option("audio", "The field that holds the recording's path in jsonl.", "Speech")
    transcript_field: str = option("text", "The field that holds what is said in jsonl.", "Speech")
    subsampling: int = option(2, "Frames of 10 ms that make one place of the sequence.", "Speech", least=1)


@register
class CtcTask(SequenceTask):
    """A recording is the unit of progress, a letter that of the measure; beside it the edits per letter of the likeliest path."""

    name, model_type, of = "ctc", "tarnn", "recordings"
    architecture, next, reads_text = "TarnnForCTC", "predict", False
    settings_class = CtcSettings
    unit, counted, rates = "bits_per_letter", "recordings", ("letter_error_rate",)

    def __init__(self, settings: CtcSettings, first: bool, saved: dict[str, Any] | None, report: Report):
        from tarnn.tasks.speech.transcripts import LETTERS

        self.settings: CtcSettings = settings
        val = None if settings.val is None else self.read_rows([settings.val])
        train, held_out = split(self.read_rows(settings.sources), val, settings, report)
        self.data_facts = {"train": facts_of(train), "validation": facts_of(held_out)}
        refuse_other_data(self.data_facts, saved, self, settings)
        self.front, parts = front_end(train), []
        for part in (train, held_out):
            parts.append(self.read(part))
        self.normalize(parts[0])
        rows_of = [[row | {"input_features": self.normal(row["input_features"])} for row in part] for part in parts]
        self.examples, *rest = (padded(part) for part in rows_of if part)
        self.held_out = rest[0] if rest else None
        self.tokenizer = symbols_tokenizer(settings.out, LETTERS)
        self.front.save_pretrained(settings.out)
        self.epoch, self.example = len(self.examples), self.input_of(train[0])

    def read_rows(self, sources: Sequence[str]) -> list[Pair]:
        """Paths are seen from the file that names them."""
        names = (self.settings.audio_field, self.settings.transcript_field)
        return [
            pair._replace(first=str(Path(source).expanduser().parent / pair.first))
            for source in sources
            for pair in read_pairs([source], *names)
        ]

    @staticmethod
    def input_of(row: Pair) -> str:
        return row.first

    def examples_of(self, rows: list[Pair], trained: Trained, report: Report) -> PaddedRows:
        from tarnn.huggingface.speech_features import open_front_end

        self.settings = replace(self.settings, subsampling=trained.config.subsampling)
        self.front = open_front_end(trained.folder, trained.config.input_size)
        return padded(self.read(rows))

    def read(self, rows: Sequence[Pair]) -> list[dict[str, np.ndarray]]:
        """Frames and letters; UserError, with file and line, for what has no path that spells it."""
        from tarnn.tasks.speech.audio import read_wav
        from tarnn.tasks.speech.ctc import places_needed
        from tarnn.tasks.speech.transcripts import LETTERS, Symbols, letters_of

        symbols, found = Symbols(LETTERS), []
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
            found.append({"input_features": frames, "labels": ids})
        return found

    def normalize(self, rows: Sequence[dict[str, np.ndarray]]) -> None:
        """Tells the front end the mean and the spread of the training frames."""
        import numpy as np

        every = np.concatenate([row["input_features"] for row in rows])
        self.front.mean, self.front.std = every.mean(0).tolist(), (every.std(0) + 1e-5).tolist()

    def normal(self, frames: np.ndarray) -> np.ndarray:
        import numpy as np

        return ((frames - np.array(self.front.mean)) / np.array(self.front.std)).astype(np.float32)

    @staticmethod
    def classes() -> tuple[Any, Any]:
        from tarnn.models import TarnnConfig, TarnnForCTC

        return TarnnConfig, TarnnForCTC

    @staticmethod
    def check(settings: CtcSettings) -> None:
        ctc_config(settings, 40)

    def config(self) -> Any:
        return ctc_config(self.settings, self.front.feature_size)

    def sums(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        return self.outcome(model, batch)[0]

    def outcome(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Any]]:
        """Nats, letters, letters, and the edits that make the likeliest path's letters those that are said; and of each
        recording what was found and what is said."""
        import torch

        from tarnn.numerics import widest
        from tarnn.tasks.speech.ctc import best_path, edits

        out = model(**batch)
        logits = out.logits.float()
        lengths = model.model.embed_tokens.num_positions(batch["attention_mask"].sum(-1))
        real = batch["labels"] >= 0
        nats = torch.nn.functional.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1), batch["labels"][real], lengths, real.sum(-1), reduction="sum"
        )
        wanted = [row[row >= 0].tolist() for row in batch["labels"]]
        found = [best_path(row[:n].cpu().numpy()) for row, n in zip(logits, lengths.tolist())]
        wrong, count = sum(map(edits, found, wanted)), sum(map(len, wanted))
        nats = nats.to(widest(nats.device))
        return torch.stack([nats, *(nats.new_tensor(x) for x in (count, count, wrong))]), list(zip(found, wanted))

    def details(self, outcomes: list[Any]) -> dict[str, Any]:
        """word_error_rate: edits of words per word that is said."""
        from tarnn.tasks.speech.ctc import edits
        from tarnn.tasks.speech.transcripts import LETTERS, SPACE, Symbols

        symbols = Symbols(LETTERS)
        words = [[symbols.text_of(ids).split(SPACE) for ids in pair] for pair in outcomes]
        words = [[[word for word in text if word] for text in pair] for pair in words]
        wrong, count = sum(edits(*pair) for pair in words), sum(len(wanted) for _, wanted in words)
        return {"words": count, "word_error_rate": wrong / max(1, count)}

    def rows(self) -> dict[str, str]:
        train, held_out = self.data_facts["train"], self.data_facts["validation"]
        return {
            "recordings": f"{', '.join(self.settings.sources)}: {train['rows']:,}, {self.front.sampling_rate:,} Hz",
            "validation": f"{held_out['rows']:,} recordings, {self.settings.val or 'picked at random'}"
            if held_out["rows"]
            else "none: the latest model is kept, not the best",
        }

    @classmethod
    def predict(cls, model: Any, reader: Any, inputs: Iterator[str], top: int) -> Iterator[dict[str, Any]]:
        """The letters of the likeliest path as "output"."""
        import torch

        from tarnn.tasks.speech.audio import read_wav
        from tarnn.tasks.speech.ctc import best_path
        from tarnn.tasks.speech.transcripts import LETTERS, SPACE, Symbols

        for path in inputs:
            samples, rate = read_wav(path)
            reader.check(samples, rate, path)
            frames = torch.from_numpy(reader.frames(samples))[None].to(model.device)
            ids = best_path(model(input_features=frames).logits[0].float().cpu().numpy())
            yield {"output": Symbols(LETTERS).text_of(ids).replace(SPACE, " ")}


def padded(rows: Sequence[dict[str, np.ndarray]]) -> PaddedRows:
    from tarnn.data.examples import PaddedRows

    return PaddedRows(rows, {"input_features": 0.0, "labels": -100})


def front_end(rows: Sequence[Pair]) -> Any:
    """Log-mel frames at the rate of the first recording."""
    from tarnn.models import SpeechFeatures
    from tarnn.tasks.speech.audio import read_wav

    try:
        return SpeechFeatures(40, read_wav(rows[0].first)[1])
    except (UserError, OSError) as error:
        raise UserError(f"{rows[0].place}: {error}") from error


def symbols_tokenizer(folder: Path, names: Sequence[str]) -> Any:
    """Of the blank (number 0) and the symbols, as `tarnn transcribe` reads it; its vocab.json is in `folder`."""
    from transformers import Wav2Vec2CTCTokenizer

    from tarnn.tasks.speech.transcripts import BLANK, SPACE

    file = folder / "vocab.json"
    file.write_text(json.dumps({name: i for i, name in enumerate((BLANK, *names, "<unk>"))}))
    return Wav2Vec2CTCTokenizer(file, bos_token=None, eos_token=None, pad_token=BLANK, word_delimiter_token=SPACE)


def ctc_config(settings: CtcSettings, input_size: int) -> Any:
    """The config that the settings ask for."""
    from tarnn.models import TarnnConfig
    from tarnn.tasks.model import chosen, make_config
    from tarnn.tasks.speech.transcripts import LETTERS

    fixed = {
        "causal": settings.causal,
        "input_size": input_size,
        "subsampling": settings.subsampling,
        "vocab_size": len(LETTERS) + 1,
        "pad_token_id": 0,
    }
    return make_config(TarnnConfig, settings, chosen(settings) | fixed)
