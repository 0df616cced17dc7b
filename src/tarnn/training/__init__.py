"""What the Trainer needs from us: safe checkpoints, bits per byte, a budget of minutes, a log."""
