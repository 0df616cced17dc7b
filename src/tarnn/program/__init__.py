"""Programs: a model as a list of instructions, its plan in phases, and what runs it."""
