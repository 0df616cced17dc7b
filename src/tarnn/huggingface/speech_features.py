"""The log-mel or cepstral frames of sound that a model reads."""

from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
from transformers import BatchFeature, SequenceFeatureExtractor
from transformers.audio_utils import mel_filter_bank

from tarnn.errors import UserError
from tarnn.json_file import read_json


class SpeechFeatures(SequenceFeatureExtractor):
    """Computes frames of sound, the `input_features` of `TarnnForCTC`; saved as preprocessor_config.json.

    kind: "log_mel", the logarithms of the energies in `num_filters` bands of equal width on the mel scale; or "mfcc", the
    first `feature_size` coefficients of their cosine transform. A frame spans `window` seconds and begins `hop` seconds
    after the one before; only whole frames are read, so a frame depends on its own samples alone and a stream gives the
    frames of the whole. mean and std (feature_size,): of the training frames, by which features are normalised.
    """

    model_input_names = ["input_features", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        feature_size: int = 40,
        sampling_rate: int = 16000,
        kind: str = "log_mel",
        num_filters: int = 40,
        window: float = 0.025,
        hop: float = 0.01,
        low: float = 20.0,
        high: float | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        padding_value: float = 0.0,
        **kwargs: Any,
    ):
        counts = {"feature_size": feature_size, "num_filters": num_filters, "sampling_rate": sampling_rate}
        spans = {"window": window, "hop": hop, "low": low, "high": high}
        check_frames(counts, spans, {"mean": mean, "std": std})
        super().__init__(feature_size, sampling_rate, padding_value, **kwargs)
        if kind not in ("log_mel", "mfcc"):
            raise ValueError(f"kind must be log_mel or mfcc; got {kind!r}.")
        if feature_size > num_filters or (kind == "log_mel" and feature_size != num_filters):
            raise ValueError(
                f"log_mel has as many features as filters, mfcc at most as many; got {feature_size} and {num_filters}."
            )
        self.kind, self.num_filters, self.window, self.hop, self.low = kind, num_filters, window, hop, low
        self.high = sampling_rate / 2 if high is None else high
        self.mean, self.std = mean, std

    @property
    def frame_length(self) -> int:
        """The number of samples in a frame."""
        return round(self.window * self.sampling_rate)

    @property
    def hop_length(self) -> int:
        """The number of samples from one frame to the next."""
        return round(self.hop * self.sampling_rate)

    def check(self, samples: np.ndarray, rate: int, name: str = "the sound") -> None:
        """Raise UserError for another rate than the model's, and for less than one frame."""
        if rate != self.sampling_rate:
            raise UserError(
                f"{name} has {rate:,} samples per second; expected {self.sampling_rate:,}, as in training. Resample it: "
                f"`sox IN.wav -r {self.sampling_rate} OUT.wav`."
            )
        if len(samples) < self.frame_length:
            raise UserError(
                f"{name} has {len(samples):,} samples, less than one frame of {self.frame_length:,}; expected more sound."
            )

    def frames(self, samples: np.ndarray) -> np.ndarray:
        """Compute (frames, feature_size) float32 from samples (n,), normalised if mean and std are known."""
        size = 1 << (self.frame_length - 1).bit_length()
        pieces = np.lib.stride_tricks.sliding_window_view(samples, self.frame_length)[:: self.hop_length]
        before = np.concatenate([pieces[:, :1], pieces[:, :-1]], axis=1)
        spectra = np.fft.rfft((pieces - 0.97 * before) * np.hamming(self.frame_length + 1)[:-1], size)
        bank = mel_filters(size, self.num_filters, self.low, self.high, self.sampling_rate)
        features = np.log(np.maximum(np.abs(spectra) ** 2 @ bank, 1e-10))
        if self.kind == "mfcc":
            features = features @ cosines(self.num_filters, self.feature_size)
        if self.mean is not None and self.std is not None:
            features = (features - np.array(self.mean)) / np.array(self.std)
        return features.astype(np.float32)

    def __call__(
        self,
        raw_speech: Any,
        sampling_rate: int | None = None,
        padding: bool | str = True,
        return_tensors: str | None = None,
        **kwargs: Any,
    ) -> BatchFeature:
        """Compute padded input_features (b, t, n) and their attention_mask for one sound or a list, each samples (n,)."""
        several = isinstance(raw_speech, list | tuple) and len(raw_speech) > 0 and np.ndim(raw_speech[0]) == 1
        sounds = [np.asarray(x, np.float32) for x in (raw_speech if several else [raw_speech])]
        for sound in sounds:
            self.check(sound, self.sampling_rate if sampling_rate is None else sampling_rate)
        batch = BatchFeature({"input_features": [self.frames(x) for x in sounds]})
        return self.pad(batch, padding=padding, return_attention_mask=True, return_tensors=return_tensors)


def open_front_end(folder: Path, input_size: int | None) -> SpeechFeatures:
    """Open the front end saved with a speech model that reads frames of `input_size` numbers; data only.

    Raises UserError if it is missing, can't be read, or makes other frames.
    """
    file = folder / "preprocessor_config.json"
    if not file.is_file():
        raise UserError(
            f"{folder} holds no model of speech: it has no {file.name}. `tarnn train --task ctc` makes one."
        )
    fields = read_json(file)
    try:
        front: Any = SpeechFeatures.from_dict({k: v for k, v in fields.items() if k != "auto_map"})
    except Exception as error:  # of wrong types in transformers' own keys, whatever it raises
        raise UserError(f"{file}: {' '.join(str(error).split())[:300]}") from error
    if input_size != front.feature_size:
        raise UserError(
            f"{folder}: the model reads frames of {input_size} numbers and its front end makes {front.feature_size}: "
            "they don't belong together."
        )
    return front


def check_frames(counts: dict[str, Any], spans: dict[str, Any], statistics: dict[str, Any]) -> None:
    """Raise ValueError for values in a file that describe no frames."""
    for name, value in counts.items():
        most = 10**6 if name == "sampling_rate" else 4096
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{name} must be a whole number from 1 to {most:,}; got {value!r:.60}.")
    rate, feature_size = counts["sampling_rate"], counts["feature_size"]
    for name, value in spans.items():
        least, most = (1 / rate, 10) if name in ("window", "hop") else (0, rate / 2)
        if (
            type(value) not in (int, float, *([type(None)] if name == "high" else []))
            or not least <= (value or least) <= most
        ):
            raise ValueError(f"{name} must be a number from {least:g} to {most:g}; got {value!r:.60}.")
    for name, values in statistics.items():
        numbers = values is None or (isinstance(values, list | tuple) and len(values) == feature_size)
        if not numbers or not all(isinstance(x, int | float) and isfinite(x) for x in values or ()):
            raise ValueError(f"{name} must be {feature_size} numbers, one per feature; got {values!r:.60}.")


@lru_cache(maxsize=4)
def mel_filters(size: int, num_filters: int, low: float, high: float, rate: int) -> np.ndarray:
    """Compute each frequency's weight in each band, (size / 2 + 1, num_filters)."""
    return mel_filter_bank(size // 2 + 1, num_filters, low, high, rate, norm=None, mel_scale="htk")


def cosines(num_filters: int, count: int) -> np.ndarray:
    """Compute the cosine transform (DCT-II, orthonormal) from log energies to cepstra, (num_filters, count)."""
    angles = (np.arange(num_filters) + 0.5)[:, None] * np.arange(count) * np.pi / num_filters
    table = np.cos(angles) * np.sqrt(2 / num_filters)
    table[:, 0] /= np.sqrt(2)
    return table
