"""Frames of numbers (of a spectrogram, of sensors) as the input of a model, instead of token embeddings."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad


class Frames(nn.Module):
    """y_i = W [x_{s·i}, …, x_{s·i+s−1}] + b: each `subsampling` = s neighbouring frames become one position of the sequence.

    This is a convolution with stride = kernel size: output positions share no frames, so a stream may be read in
    pieces of any multiple of s frames. Missing frames of the last position are zeros.
    """

    def __init__(self, input_size: int, width: int, subsampling: int = 1):
        super().__init__()
        self.input_size, self.subsampling = input_size, subsampling
        self.proj = nn.Linear(self.proj_inputs(width), width)

    def proj_inputs(self, width: int) -> int:
        """The numbers of which the last matrix makes a position."""
        return self.input_size * self.subsampling

    def forward(self, frames: Float[Tensor, "b t n"]) -> Float[Tensor, "b p width"]:
        return self.positions(self.checked(frames), None)

    def positions(self, frames: Float[Tensor, "b t n"], mask: Tensor | None) -> Float[Tensor, "b p width"]:
        """Embed frames that are zeros where the mask (b, t) is False."""
        frames = pad(frames, (0, 0, 0, -frames.shape[1] % self.subsampling))
        return self.proj(frames.unflatten(1, (-1, self.subsampling)).flatten(2))

    def prefill(
        self, frames: Float[Tensor, "b t n"], state: tuple[Tensor, ...]
    ) -> tuple[Float[Tensor, "b p width"], tuple[Tensor, ...]]:
        """Embed the next piece of a stream: what it becomes, and the state after it (`new_state`)."""
        return self(frames), state

    def new_state(self, batch_size: int) -> tuple[Tensor, ...]:
        """Return what positions need of the frames before a piece: here nothing."""
        return ()

    def checked(self, frames: Tensor) -> Tensor:
        """Return the frames in the weights' type. Raises ValueError for others than the model reads."""
        if frames.ndim != 3 or frames.shape[-1] != self.input_size or not frames.is_floating_point():
            raise ValueError(
                f"this model reads frames (b, t, {self.input_size}) of floating-point numbers; got {frames.dtype} "
                f"{tuple(frames.shape)}."
            )
        return frames.to(self.proj.weight.dtype)

    def read(self, frames: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Embed frames (b, t, n) with their mask (b, t), 0 = padding at the end of a row; return also the positions' mask.

        Padding is read as zeros, so a padded row gives the same as the row alone. Raises ValueError for padding elsewhere.
        """
        frames = self.checked(frames)
        if mask is None:
            return self.positions(frames, None), None
        if mask.shape != frames.shape[:2] or (mask[:, 1:] > mask[:, :-1]).any():
            raise ValueError(
                f"the attention_mask of frames is (b, t) = {tuple(frames.shape[:2])}, 1 and then 0 where padding ends a "
                f"row; got {tuple(mask.shape)}{'' if mask.shape != frames.shape[:2] else ' with padding before frames'}."
            )
        real = mask.bool()
        return self.positions(frames.masked_fill(~real[..., None], 0.0), real), mask[:, :: self.subsampling]

    def num_positions(self, num_frames: Tensor) -> Tensor:
        """Return the number of positions that so many frames become."""
        return torch.div(num_frames + self.subsampling - 1, self.subsampling, rounding_mode="floor")

    def extra_repr(self) -> str:
        return f"{self.input_size}, subsampling={self.subsampling}"
