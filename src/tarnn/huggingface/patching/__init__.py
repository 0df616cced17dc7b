"""Linear models of transformers computed by tarnn's ops: `patch_transformers` (`patch.py`), and what it puts where.

One file for each pair of functions that families share (`delta.py`, `convolution.py`, `selective.py`, `ssd.py`) or for the
layer of one family (`lightning.py`, `griffin.py`, `mlstm.py`); `families.py` is the table of who calls what.

The models of flash-linear-attention: `patch_fla` (`fla.py`), their recurrences and what is around them (`fla_recurrences.py`,
`fla_modules.py`).
"""
