"""Losses of one token: what each says depends on that token's log-probabilities and advantage alone. One file a loss."""
