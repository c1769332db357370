"""Training of speculative drafters (DFlash, DFlash2): anchors instead of blocks, a frozen target's features as context."""
