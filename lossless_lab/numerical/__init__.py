"""Level 1, the same computation: differences in logits, activations and token ids."""
