"""AN4 and FSDD as utterances: frames of sound, and the symbols that are said."""

import io
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from measures.pronunciations import phones_of, read_pronunciations
from scripts.common.results import Unmeasured
from tarnn.models import SpeechFeatures
from tarnn.tasks.speech.ctc import places_needed
from tarnn.tasks.speech.recordings import LETTERS, Symbols, letters_of, read_wav

DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")


class Utterance(NamedTuple):
    frames: np.ndarray  # (t, n) float32
    ids: np.ndarray  # of its symbols
    speaker: str
    place: str  # for messages

    @property
    def row(self) -> dict[str, np.ndarray]:
        """As a model's arguments are called."""
        return {"input_features": self.frames, "labels": self.ids}


class Data(NamedTuple):
    train: list[Utterance]
    test: list[Utterance]
    symbols: Symbols
    front: SpeechFeatures | None  # what made the frames of sound, where that is at hand
    subsampling: int = 1


def read(name: str, folder: Path, subsampling: int, most: int | None) -> Data:
    """Read the utterances of "an4 phones", "an4 letters" or "fsdd letters", or the first few; their frames are normalised."""
    if name.startswith("an4"):
        data = an4(folder / "an4", phones=name.endswith("phones"), most=most)
    else:
        data = fsdd(folder / "fsdd" / "recordings.zip", most=most)
    every = np.concatenate([x.frames for x in data.train])
    mean, std = every.mean(0), every.std(0)
    if data.front is not None:
        data.front.mean, data.front.std = mean.tolist(), std.tolist()
    for x in data.train:
        check_room(x, subsampling)
    parts = [[x._replace(frames=(x.frames - mean) / std) for x in part] for part in data[:2]]
    return Data(*parts, data.symbols, data.front, subsampling)


def an4(folder: Path, *, phones: bool, most: int | None) -> Data:
    words = read_pronunciations(folder / "an4.dic")
    names = tuple((folder / "an4.phone").read_text().split()) if phones else LETTERS
    symbols, parts = Symbols(names), []
    for part in ("train", "test"):
        file = np.load(folder / f"{part}.npz")
        features, bounds, some = file["features"], file["offsets"], []
        for i, (who, text) in enumerate(zip(file["ids"][:most], file["text"])):
            place = f"{folder / part}.npz, utterance {who}"
            said = phones_of(str(text), words, place) if phones else letters_of(str(text))
            frames = features[bounds[i] : bounds[i + 1]].astype(np.float32)
            speaker = str(who).rpartition("/")[0]
            some.append(Utterance(frames, symbols.ids(said, place), speaker, place))
        parts.append(some)
    return Data(*parts, symbols, None)


def fsdd(path: Path, *, most: int | None) -> Data:
    front, symbols = SpeechFeatures(40, 8000, high=4000.0), Symbols(LETTERS)
    parts: tuple[list[Utterance], list[Utterance]] = ([], [])
    for name, samples, rate, is_test in recordings(path, most):
        digit, speaker, _ = name.split("_")
        front.check(samples, rate, f"{path}/{name}")
        ids = symbols.ids(DIGITS[int(digit)], name)
        parts[is_test].append(Utterance(front.frames(samples), ids, speaker, f"{path}/{name}"))
    return Data(*parts, symbols, front)


def recordings(path: Path, most: int | None) -> Iterator[tuple[str, np.ndarray, int, bool]]:
    """Read FSDD, or the first few of each part: names, samples, their rate, and whether it is the official test part."""
    left = {False: most, True: most}
    with zipfile.ZipFile(path) as archive:
        names = sorted(archive.namelist())
        random.Random(0).shuffle(names)  # so that the first few are of all digits and speakers
        for name in names:
            is_test = int(name.removesuffix(".wav").split("_")[2]) < 5
            if (some := left[is_test]) is not None:
                if not some:
                    continue
                left[is_test] = some - 1
            yield name, *read_wav(f"{path}/{name}", io.BytesIO(archive.read(name))), is_test


def sound_of_tests(path: Path, most: int | None) -> np.ndarray:
    """The samples of FSDD's test part, one recording after another."""
    return np.concatenate([samples for _, samples, _, is_test in recordings(path, most) if is_test])


def check_room(x: Utterance, subsampling: int) -> None:
    """Else no path spells the symbols, and the loss is infinite."""
    places, needed = -(-len(x.frames) // subsampling), places_needed(x.ids)
    if places < needed:
        raise Unmeasured(f"{x.place} has {places} places for {needed} symbols.")


def without_speakers(data: Data, every: int = 8) -> Data:
    """Hold out each 8th speaker of the training part; they take the place of the test part."""
    held_out = set(sorted({x.speaker for x in data.train})[::every])
    train = [x for x in data.train if x.speaker not in held_out]
    return data._replace(train=train, test=[x for x in data.train if x.speaker in held_out])
