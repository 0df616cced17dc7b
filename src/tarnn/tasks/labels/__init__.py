"""Labels: one for each text, or one for each of its words."""
