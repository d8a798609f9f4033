"""Level 1, the same computation: what differs in logits, activations and token ids, and by how much."""
