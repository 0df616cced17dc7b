"""What several experiments measure: the error of features, attention between residues, queries and keys of trained models."""
