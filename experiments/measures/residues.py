"""Which amino acids a model treats alike, by its attention; and BLOSUM62, by which they replace each other in evolution."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tarnn.analysis.attention_maps import attention_maps
from tarnn.data.proteins import AMINO_ACIDS
from tarnn.errors import UserError

KINDS = len(AMINO_ACIDS)


def attention_to_residues(model: Any, sequences: Iterable[Tensor], **options: Any) -> np.ndarray:
    """(heads of all layers, 20): the share of each head's attention that each kind of residue gets, over all sequences.

    sequences: ids (t,) of `amino_tokenizer`. options: those of the model's call. No attention matrix is formed: the values
    are indicators of the kinds, in time linear in t for linear attention.
    """
    total: Any = 0
    for ids in sequences:
        kinds = one_hot(ids, max(KINDS, int(ids.max()) + 1))[:, :KINDS].float()[None]  # (1, t, 20)
        maps = attention_maps(model, input_ids=ids[None], **options)
        total = total + torch.cat([one.onto(kinds)[0].double().sum(1) for one in maps])  # over queries
    found = total.cpu().numpy()
    return found / found.sum(1, keepdims=True)


def similarity(shares: np.ndarray) -> np.ndarray:
    """(20, 20): Pearson's correlation over heads of the shares that two kinds of residues get (Vig et al. 2021, section 4.1,
    arXiv 2006.15222), which the Performer paper takes over (appendix C.4)."""
    return np.corrcoef(shares.T)


def read_matrix(path: str | Path) -> np.ndarray:
    """(20, 20): a substitution matrix in NCBI's form, in the order of AMINO_ACIDS. UserError with file and line."""
    rows = [(n, line.split()) for n, line in enumerate(Path(path).read_text().splitlines(), start=1) if line[:1] != "#"]
    rows = [(n, row) for n, row in rows if row]
    letters = rows[0][1] if rows else []
    found = {}
    for n, (name, *values) in rows[1:]:
        try:
            found[name] = dict(zip(letters, map(float, values), strict=True))
        except ValueError:
            raise UserError(
                f"{path}, line {n}: expected a letter and {len(letters)} numbers; got {name} and {len(values)} words."
            ) from None
    if missing := [x for x in AMINO_ACIDS if x not in found or x not in letters]:
        raise UserError(f"{path} has no row or column of {', '.join(missing)}; expected all of {AMINO_ACIDS}.")
    return np.array([[found[a][b] for b in AMINO_ACIDS] for a in AMINO_ACIDS])


def agreement(one: np.ndarray, other: np.ndarray) -> float:
    """Pearson's correlation of two such matrices over the 190 pairs of different residues."""
    above = np.triu_indices(KINDS, 1)
    return float(np.corrcoef(one[above], other[above])[0, 1])


def chance(one: np.ndarray, other: np.ndarray, draws: int = 10_000) -> float:
    """How often the agreement is as large or larger if the residues of one matrix are shuffled (Mantel 1967)."""
    source, found = np.random.default_rng(0), agreement(one, other)
    orders = (source.permutation(KINDS) for _ in range(draws))
    return sum(agreement(one[np.ix_(x, x)], other) >= found for x in orders) / draws


def closest(matrix: np.ndarray, count: int = 6) -> list[str]:
    """The pairs of different residues that are most alike, such as DE."""
    rows, columns = np.triu_indices(KINDS, 1)
    order = np.argsort(-matrix[rows, columns], kind="stable")[:count]
    return [AMINO_ACIDS[rows[i]] + AMINO_ACIDS[columns[i]] for i in order]
