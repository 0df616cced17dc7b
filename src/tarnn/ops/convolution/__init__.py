"""Short convolution: one filter per channel over the last few tokens."""
