"""Both graphs of a model in onnxruntime, and the states behind what they read."""

from pathlib import Path
from typing import Any

import numpy as np
from onnxruntime import InferenceSession, SessionOptions


class OnnxModel:
    """A text in onnxruntime: `read` goes on from what was read before. rows: texts of one length, side by side."""

    def __init__(self, prompt: Path, step: Path, rows: int = 1, options: SessionOptions | None = None):
        self.sessions = [InferenceSession(str(file), options, ["CPUExecutionProvider"]) for file in (prompt, step)]
        inputs = {x.name: x.shape for x in self.sessions[0].get_inputs()}
        self.position, self.needs_positions = 0, "position_ids" in inputs
        self.outputs = [x.name for x in self.sessions[0].get_outputs()]
        self.states = {
            name: np.zeros([rows, *(0 if isinstance(n, str) else n for n in shape[1:])], np.float32)
            for name, shape in inputs.items()
            if name.startswith("past")
        }

    def read(self, ids: Any) -> Any:
        """Read tokens (rows, t), int64: the logits of the last, (rows, 1, v)."""
        rows, length = ids.shape
        inputs = {"input_ids": ids, **self.states}
        if self.needs_positions:
            inputs["position_ids"] = np.tile(np.arange(self.position, self.position + length), (rows, 1))
        logits, *states = self.sessions[length == 1].run(self.outputs, inputs)
        self.position += length
        self.states = {before(name): x for name, x in zip(self.outputs[1:], states, strict=True)}
        return logits


def before(name: str) -> str:
    """Return the input that takes an output of the token before."""
    return name.replace("present", "past_key_values" if name.endswith((".key", ".value")) else "past")
