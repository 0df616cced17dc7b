"""Layouts of other models' folders, a file each: what they lack, their config, and our tensors under their names.

`families` reads the same layouts; `tarnn.export.hf` checks what is written here by it.
"""
