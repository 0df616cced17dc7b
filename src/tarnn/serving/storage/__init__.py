"""The parts of `tarnn.serving.store`: a tree over tokens, states as bytes, memory, disk."""
